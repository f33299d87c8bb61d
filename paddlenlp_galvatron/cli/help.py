"""The text of `--help`: usage, an example, and the options in panels, first those that most runs need."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from typing import Any

from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from typer.core import TyperOption

from paddlenlp_galvatron.base.printing import Console
from paddlenlp_galvatron.interop.aliases import other_names

WIDEST = 120  # columns; where there is no terminal, too
EXIT_CODES = "Exit codes: 0 done, 1 failed, 2 bad input, 3 nothing feasible, 130 Ctrl-C."
EXAMPLES = {
    "convert h2g": "galvatron convert h2g my-model/ output/from-hf",
    "data prepare": "galvatron data prepare my_texts/ --tokenizer my-model/ --output data/mine",
    "doctor": "galvatron doctor --plan plan.json",
    "explain": "galvatron explain plan.json",
    "fit": "galvatron fit qwen2.5-7b --device h100-80gb --gpus 8",
    "parity": "galvatron parity plan.json --model qwen2",
    "plan diff": "galvatron plan diff first.json second.json",
    "plan show": "galvatron plan show plan.json",
    "profile all": "galvatron profile all my-model/ --nproc 8 --seq_length 4096 --output profiles",
    "report": "galvatron report plan.json",
    "search": "galvatron search qwen2.5-7b --device h100-80gb --gpus 8 --batch 256 -o plan.json",
    "train": "galvatron train plan.json --model my-model/ --input_dir data/mine --max_steps 1000",
    "what-if": "galvatron what-if qwen2.5-7b --device h100-80gb",
}
COMMON, SPACE, PROFILES, OUTPUT, OTHERS = "Common", "Space", "Profiles", "Output", "Options"
FIRST, LAST = (COMMON, SPACE, PROFILES), OUTPUT
PANELS = {  # options by name -> panel, before that of their group
    **dict.fromkeys(("model_size", "model", "galvatron_config_path", "plan", "device", "gpus", "analytic"), COMMON),
    **dict.fromkeys(("num_nodes", "num_gpus_per_node", "world_size", "nproc", "memory_constraint"), COMMON),
    **dict.fromkeys(("seq_length", "settle_bsz", "global_train_batch_size", "mixed_precision", "task"), COMMON),
    **dict.fromkeys(("input_dir", "max_steps", "load", "dry_run", "profiles"), COMMON),
    **dict.fromkeys(("search_space", "fine_grained_mode", "sp_space", "recompute_parts", "embed_sdp"), SPACE),
    **dict.fromkeys(("tp_consec", "pipeline_type", "default_dp_type", "max_tp_deg", "max_sp_deg"), SPACE),
    **dict.fromkeys(("max_cp_deg", "max_pp_deg", "max_virtual_pp_deg", "settle_chunk"), SPACE),
    **{f"disable_{name}": SPACE for name in ("dp", "sdp", "tp", "sp", "cp", "pp", "ckpt", "vtp")},
    **dict.fromkeys(("profile_mode", "time_profile_mode", "memory_profile_mode", "profile_dialect"), PROFILES),
    **dict.fromkeys(("time_profiling_path", "memory_profiling_path", "allreduce_bandwidth_config_path"), PROFILES),
    **dict.fromkeys(("p2p_bandwidth_config_path", "overlap_coe_path", "sp_time_path"), PROFILES),
    **dict.fromkeys(("allow_foreign_profiles", "profile_gpu_num"), PROFILES),
    **dict.fromkeys(("json", "output", "output_dir", "output_config_path", "log_dir", "save_runners_up"), OUTPUT),
}


def of_command(command: Any, path: str) -> str:
    """The help of one command; `path`: its words, such as `galvatron plan show`."""
    options = [one for one in command.params if isinstance(one, TyperOption) and not one.hidden]
    arguments = [one for one in command.params if not isinstance(one, TyperOption)]
    names = [max(one.opts, key=len).removeprefix("--") for one in options]
    usage = " ".join([path, *(_argument(one) for one in arguments), "[OPTIONS]"])
    rows: dict[str, list[tuple[Text, Text]]] = {}
    for one in arguments:
        rows.setdefault("Arguments", []).append((Text(str(one.metavar or one.name.upper())), Text(one.help or "")))
    places = {name: place for place, name in enumerate(PANELS)}
    for one, name in sorted(zip(options, names, strict=True), key=lambda pair: places.get(pair[1], len(places))):
        panel = PANELS.get(name) or one.rich_help_panel or OTHERS
        rows.setdefault(panel, []).append(_row(one, name, names))
    order = ["Arguments", *FIRST, *(panel for panel in rows if panel not in (*FIRST, LAST, "Arguments")), LAST]
    lines: list[Any] = [f"Usage: {usage}\n", *_paragraphs(command.help)]
    if example := EXAMPLES.get(path.removeprefix("galvatron ")):
        lines.append(Text.assemble("Example: ", (example, "bold"), "\n"))
    return _printed([*lines, *(_panel(panel, rows[panel]) for panel in order if panel in rows), EXIT_CODES])


def of_group(group: Any, path: str) -> str:
    """The help of a group: its commands."""
    rows = [(Text(name, "bold"), Text(one.get_short_help_str())) for name, one in group.commands.items()]
    usage = f"Usage: {path} COMMAND [OPTIONS]\n"
    return _printed([usage, *_paragraphs(group.help), _panel("Commands", rows), EXIT_CODES])


def _argument(one: Any) -> str:
    name = str(one.metavar or one.name.upper())
    return name if one.required else f"[{name}]"


def _row(one: TyperOption, name: str, names: Iterable[str]) -> tuple[Text, Text]:
    """An option as it is typed, and what it means, with its default and its other names."""
    short = [opt for opt in one.opts if not opt.startswith("--")]
    annotation = one.type_descriptor.annotation
    kind = f"<{getattr(annotation, '__name__', 'str').lower()}>" if one.metavar is None else one.metavar.strip()
    typed = Text.assemble((", ".join([f"--{name}", *short]), "bold"), f" {kind}" if kind else "")
    text = " ".join((one.help or "").split())
    if "[default: " not in text and one.default not in (None, False, ()) and not callable(one.default):
        text += f" [default: {getattr(one.default, 'value', one.default)}]"
    others = [f"--{other}" for other in other_names(name, list(names))]
    return typed, Text.assemble(text, (f" (also {', '.join(others)})" if others else "", "dim"))


def _panel(title: str, rows: Iterable[tuple[Text, Text]]) -> Panel:
    table = Table.grid(padding=(0, 2, 0, 0), expand=True)
    table.add_column(max_width=34, min_width=16, overflow="fold")
    table.add_column(ratio=1, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return Panel(table, title=title, title_align="left")


def _paragraphs(text: str | None) -> list[str]:
    return [" ".join(text.split()) + "\n"] if text else []


def _printed(items: Iterable[Any]) -> str:
    console = Console(width=min(shutil.get_terminal_size((WIDEST, 0)).columns, WIDEST))
    with console.capture() as capture:
        for item in items:
            console.print(item)
    return capture.get().rstrip("\n")
