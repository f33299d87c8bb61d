"""Writes the pages, and the parts of pages, that are made from the code, in both languages.

    python tools/pages.py [NAME ...]            write them; no NAME: all
    python tools/pages.py --check [NAME ...]    exit code 1 where one is not current

`commands`: commands.md, every command and option. Options have their texts in options/texts.json; commands, whose texts
are docstrings, their Chinese ones in commands_zh.json, with the words of the page. `accuracy`: how good predictions
from data sheets are, in one sentence. `parallelism`: the table "Which parallelism when", plans that the search finds.
`profile_keys`: the table "Keys of profile files", from their schema.
"""

import json
import re
import runpy
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import import_module
from math import ceil
from pathlib import Path
from statistics import fmean

import paddlenlp_galvatron as galvatron
from paddlenlp_galvatron.cli.command import EXIT_CODES, Command
from paddlenlp_galvatron.cli.help import default_of
from paddlenlp_galvatron.cli.main import COMMANDS
from paddlenlp_galvatron.options.aliases import VALUES as ALIAS_VALUES
from paddlenlp_galvatron.options.aliases import other_names
from paddlenlp_galvatron.options.group import PLACES
from paddlenlp_galvatron.profiles import computation, hardware, memory
from paddlenlp_galvatron.profiles.data_sheet import load_data_sheet
from paddlenlp_galvatron.report.fit import in_words

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
# `accuracy`: the sentence. `parallelism`: model, sequence length and numbers of GPUs of each row. `more`: the page that
# says more of a command, where it is not of the command's name.
DATA = json.loads(Path(__file__).with_name("pages.json").read_text(encoding="utf-8"))
SAYING = {
    "en": (ROOT / "README.md", DOCS / "en" / "planner.md"),
    "zh": (ROOT / "README_zh.md", DOCS / "zh" / "planner.md"),
}
PLACE = re.compile(r"(?<=<!-- accuracy -->\n)(?:.*\n)+?(?=(?:> )?<!-- end -->)")
TOKENS = 2**21  # of a step, the same in all rows of `parallelism`
LONG = {"sp_space": "tp+sp", "max_cp_deg": 8}
PLANS = re.compile(r"(?<=\|---\|---:\|---:\|---\|---:\|\n)(?:\|.*\n)+")
CONTENTS = {
    "`computation_profiling_…`": computation.CONTENT,
    "`memory_profiling_…`": memory.CONTENT,
    "`allreduce_bandwidth_…`": hardware.ALLREDUCE,
    "`p2p_bandwidth_…`": hardware.P2P,
    "`sp_time_…`": hardware.SP_TIME,
    "`overlap_coefficient.json`": hardware.OVERLAP,
}
KEYS = re.compile(r"(?<=\| file \| key \| meaning \| unit \|\n\|---\|---\|---\|---\|\n)(?:\|.*\n)+")
CHINESE = json.loads(Path(__file__).with_name("commands_zh.json").read_text(encoding="utf-8"))  # by the English
MANY = 4  # rows of another command's table, from which on they are not repeated
CONVENTIONS = (
    "`galvatron COMMAND --help` shows the same. Dashes and underscores in names are equivalent. A boolean option "
    "stands alone, which means true, or takes 0, 1, true or false. `None` leaves an option unset. "
    f"{EXIT_CODES}"
)
Translate = Callable[[str], str]  # an English text, in the language of a page

Pages = Iterator[tuple[Path, str]]


def commands() -> Pages:
    """The page of commands. A KeyError names the English text that commands_zh.json lacks."""
    languages: dict[str, Translate] = {"en": str, "zh": CHINESE.__getitem__}
    for language, translate in languages.items():
        yield DOCS / language / "commands.md", page(language, translate)


def page(language: str, translate: Translate) -> str:
    """The whole page."""
    begin = translate("Made from the commands themselves: `make pages` rewrites this page.")
    parts = [f"# {translate('Commands and options')}\n\n{begin}\n{translate(CONVENTIONS)}\n"]
    listed: dict[str, str] = {}
    for name in COMMANDS:
        app = import_module(f"paddlenlp_galvatron.cli.{name.replace('-', '_')}").app
        parts.append(f"## {name}\n")
        target = DOCS / language / f"{DATA['more'].get(name, name)}.md"
        if target.exists():
            heading = target.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
            parts[-1] = f"## {name}\n\n{translate('More')}: [{heading}]({target.name})\n"
        for sub, command in app.commands.items():
            parts += section(f"{name} {sub}".strip(), command, language, translate, bool(sub), listed)
    return "\n".join(parts)


def section(
    name: str, command: Command, language: str, translate: Translate, has_heading: bool, listed: dict[str, str]
) -> Iterator[str]:
    """One command. `listed`: rows that stand in tables above -> their command; many of one are only named."""
    if has_heading:
        yield f"### {name}\n"
    usage = " ".join(["galvatron", name, *command.positional.values(), "[OPTIONS]"])
    yield f"`{usage}`: {translate(command.help)}\n"
    rows = [row(command, option, language, translate) for option in (*command.positional, *command.options)]
    counts = Counter(listed.get(each, "") for each in rows)
    above: dict[str, list[str]] = {other: [] for other, count in counts.items() if other and count >= MANY}
    here = []
    for each in rows:
        if (known := above.get(listed.get(each, ""))) is not None:
            known.append(each)
        else:
            here.append(each)
            listed[each] = name
    if here:
        yield f"| {' | '.join(map(translate, ('option', 'other names', 'default', 'meaning')))} |\n|---|---|---|---|"
        yield "\n".join(here) + "\n"
    for other, known in above.items():
        names = " ".join(each.split(" | ")[0].removeprefix("| ") for each in known)
        anchor = other.replace(" ", "-")
        yield f"{translate('And, as in {}:').format(f'[{other}](#{anchor})')} {names}\n"


def row(command: Command, name: str, language: str, translate: Translate) -> str:
    """One option, or argument."""
    info, argument = command.fields[name], command.positional.get(name)
    others = ["`-o`"] * (name in PLACES) + [f"`--{name}`"] * bool(argument)
    for other in other_names(name, command.fields):
        others.append(f"`--{other}`" + translate(" (the opposite)") * (ALIAS_VALUES.get(other, {}).get("0") == "1"))
    text = command.text(name, language).replace("<", "&lt;").replace("|", "\\|")
    shown = f"`{argument or f'--{name}'}`"
    default = translate("must be given") if info.is_required() else default_of(info)
    return f"| {shown} | {' '.join(others)} | {default} | {text} |"


def accuracy() -> Pages:
    """The sentence of all rows up to 8,192 tokens."""
    benchmark = runpy.run_path(str(ROOT / "benchmarks" / "published_runs.py"))
    figures, long = benchmark["figures"], benchmark["LONG"]
    tables = [benchmark["read_runs"](path) for path in sorted((ROOT / "benchmarks" / "published_runs").iterdir())]
    rows = [figures(run, load_data_sheet(run.device)) for table in tables for run in table.runs]
    rows = [row for row in rows if row["tokens"] <= long]
    errors = sorted(abs(row["left_out_error"]) for row in rows)
    most = errors[ceil(0.9 * len(errors)) - 1]
    numbers = {"mean": fmean(errors), "rows": len(errors), "most": most, "worst": errors[-1], "long": long}
    numbers["publishers"] = len({benchmark["publisher_of"](row["source"]) for row in rows})
    for language, pages in SAYING.items():
        sentence = DATA["accuracy"][language].format(**numbers).replace("%", " %")
        for page in pages:
            quote = "> " if page.stem.startswith("README") else ""
            yield page, PLACE.sub(lambda _, line=f"{quote}{sentence}\n": line, page.read_text(encoding="utf-8"))


def parallelism() -> Pages:
    rows = ""
    for model, tokens, numbers in DATA["parallelism"]:
        for gpus in numbers:
            options = {"device": "h100-80gb", "gpus": gpus, "seq": tokens, "batch": TOKENS // tokens}
            best = galvatron.search(model, **options, **(LONG if tokens > 8192 else {})).result.require()
            speed = TOKENS / best.time_s / gpus
            rows += f"| {model} | {tokens:,} | {gpus} | {in_words(best.plan)} | {speed:,.0f} |\n"
    for page in (DOCS / language / "concepts.md" for language in ("en", "zh")):
        yield page, PLANS.sub(rows, page.read_text(encoding="utf-8"))


def key_rows() -> list[tuple[str, str, str, str]]:
    """(file, key, meaning, unit) of the numbers in profile files; choices of parts that are recomputed share a row."""
    rows = []
    for file, content in CONTENTS.items():
        texts = [(table.keys.form, text) for table, text in content.entries.values()]
        texts += [(f"galvatron.{name}", text) for name, (_, text) in content.ours.items()]
        for key, text in texts:
            unit, _, meaning = text.partition(": ")
            rows.append((file, re.sub(r"(spared|again)_.*_mib", r"\1_…_mib", key), meaning, unit))
    return list(dict.fromkeys(rows))


def profile_keys() -> Pages:
    lines, last = "", ""
    for file, key, meaning, unit in key_rows():
        cells = f"{file} |" if file != last else "|"
        lines += f"| {cells} `{key.replace('|', chr(92) + '|')}` | {meaning} | {unit} |\n"
        last = file
    page = DOCS / "en" / "files.md"
    yield page, KEYS.sub(lambda _: lines, page.read_text(encoding="utf-8"))


PARTS = {part.__name__: part for part in (commands, accuracy, parallelism, profile_keys)}


def main() -> int:
    """Write the pages. With `--check` write nothing, and return 1 where one is not current."""
    names = [word for word in sys.argv[1:] if word != "--check"] or PARTS
    made = {path: text for name in names for path, text in PARTS[name]()}
    if "--check" not in sys.argv[1:]:
        for path, text in made.items():
            path.write_text(text, encoding="utf-8")
        return 0
    stale = [path for path, text in made.items() if path.read_text(encoding="utf-8") != text]
    for path in stale:
        sys.stderr.write(f"{path}: differs from the code; renew it: make pages\n")
    return bool(stale)


if __name__ == "__main__":
    sys.exit(main())
