"""The analytic path against published runs: step time and memory from shapes and a data sheet.

    python benchmarks/published_runs.py FILE... [--json]

Each run of a file (benchmarks/published_runs/*, or of the same form) is predicted and compared with its measurement;
printed are the errors by publisher, and the rows that the planner cannot express. A file is a table (CSV), as
`galvatron calibrate` reads it, or has a run a line with its plan (JSON), which says more than the columns of a table.
"Left out" is the error by numbers that no run of the same publisher fitted (left_out.json). The last line is JSON: all
rows and errors, as shares of 1.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path
from statistics import fmean, median
from typing import Any

from pydantic import TypeAdapter

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.base.units import GIB_MIB
from paddlenlp_galvatron.check.calibration.fit import ROOM, MeasuredRun, expected
from paddlenlp_galvatron.check.calibration.sources import Table, read_table
from paddlenlp_galvatron.check.validation.accuracy import kendall
from paddlenlp_galvatron.model import ModelShape, load_model
from paddlenlp_galvatron.plan import plan_from_dict
from paddlenlp_galvatron.profiles.analytic import GROUPED, ExpertKernels
from paddlenlp_galvatron.profiles.data_sheet import DataSheet, load_data_sheet


def read_runs(path: Path) -> Table:
    """Runs of a file of either form; one of another form is skipped by name."""
    if path.suffix == ".jsonl":
        return Table([_run_of(json.loads(line)) for line in path.read_text().splitlines()])
    try:
        return read_table(path)
    except UserError as error:
        return Table(skipped=[(path.name, str(error))])


def _run_of(fields: dict[str, Any]) -> MeasuredRun:
    """`fields`: those of the run; `model`: a preset's name, or the fields of a shape."""
    model, plan, kernels = fields.pop("model"), fields.pop("plan"), fields.pop("kernels", GROUPED)
    shape = load_model(model) if isinstance(model, str) else TypeAdapter(ModelShape).validate_python(model)
    return MeasuredRun(shape=shape, plan=plan_from_dict(plan), kernels=ExpertKernels(*kernels), **fields)


LEFT_OUT = json.loads((Path(__file__).parent / "left_out.json").read_text())


def publisher_of(source: str) -> str:
    named = (name for name, publisher in LEFT_OUT.items() if source.startswith(tuple(publisher["sources"])))
    return next(named, source.removesuffix(" pretrain.rst"))


def left_out_s(run: MeasuredRun, sheet: DataSheet) -> float:
    """The step predicted by numbers that no run of its publisher fitted."""
    without = LEFT_OUT.get(publisher_of(run.source), {})
    sheet = sheet.with_stack(run.stack)
    for figure in without.get("figures", ()):
        if (figure["device"], figure["stack"]) == (sheet.name, sheet.stack):
            changed = getattr(sheet, figure["name"]).model_copy(update={"value": figure["value"]})
            sheet = sheet.model_copy(update={figure["name"]: changed})
    return expected(replace(run, **without.get("runs", {})), sheet).step_s


def figures(run: MeasuredRun, sheet: DataSheet) -> dict[str, Any]:
    """A row: measured, predicted, and the shares by which predictions are off."""
    guess = expected(run, sheet)
    plan = run.plan
    allocated = run.allocated_mib and run.allocated_mib / GIB_MIB
    return {
        "name": run.name,
        "source": run.source,
        "model": run.shape.name,
        "device": sheet.name,
        "stack": run.stack or sheet.stack,
        "tokens": plan.assumed.seq_length,
        "gpus": plan.world_size,
        "layout": f"tp {plan.layers[0].tp}, pp {plan.pipeline}, ep {plan.layers[0].ep}, batch {plan.global_batch} in "
        f"{plan.micro_batches}, recompute {', '.join(dict.fromkeys(each.recompute.words for each in plan.layers))}",
        "offload_optimizer": run.offload_optimizer,
        "step_s": run.step_s,
        "predicted_step_s": guess.step_s,
        "step_error": guess.step_s / run.step_s - 1,
        "left_out_error": left_out_s(run, sheet) / run.step_s - 1,
        "allocated_gib": allocated,
        "predicted_allocated_gib": guess.allocated_mib / GIB_MIB,
        "allocated_error": guess.allocated_mib / GIB_MIB / allocated - 1 if allocated else None,
        "reserved_gib": run.reserved_mib and run.reserved_mib / GIB_MIB,
        "predicted_reserved_gib": guess.reserved_mib / GIB_MIB,
        "bound_gib": guess.bound_mib / GIB_MIB,
        "gpu_gib": sheet.memory.value,
    }


def errors(rows: Sequence[dict[str, Any]]) -> dict[str, float | int | None]:
    steps = [abs(row["step_error"]) for row in rows]
    memory = [abs(row["allocated_error"]) for row in rows if row["allocated_error"] is not None]
    with_room = [row for row in rows if row["reserved_gib"] and row["reserved_gib"] < ROOM * row["gpu_gib"]]
    below = [row for row in with_room if row["reserved_gib"] > row["bound_gib"]]
    return {
        "step_mean": fmean(steps) if steps else None,
        "step_max": max(steps, default=None),
        "allocated_mean": fmean(memory) if memory else None,
        "allocated_max": max(memory, default=None),
        "bound_over_reserved": median([row["bound_gib"] / row["reserved_gib"] - 1 for row in with_room] or [0.0]),
        "bound_below_reserved": len(below),
        "kendall_tau": kendall([(row["predicted_step_s"], row["step_s"]) for row in rows]),
    }


LONG = 8192  # sequence length above which attention's kernel decides


def by_publisher(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """In short, as Markdown: mean error of steps, with all numbers and without those that the publisher's runs fitted;
    of the latter the 90th percentile and the largest; of memory the mean."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(publisher_of(row["source"]), []).append(row)
    groups[f"all, at most {LONG:,} tokens"] = [row for row in rows if row["tokens"] <= LONG]
    groups[f"all, more than {LONG:,} tokens"] = [row for row in rows if row["tokens"] > LONG]
    yield "| publisher | devices | rows | fitted on all | left out | 9 of 10 within | largest | allocated: mean |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, own in groups.items():
        if not own:
            continue
        steps = sorted(abs(row["left_out_error"]) for row in own)
        found = errors(own)
        memory = "-" if found["allocated_mean"] is None else f"{found['allocated_mean']:.1%}"
        devices = ", ".join(dict.fromkeys(row["device"].split("-")[0] for row in own))
        within = steps[ceil(0.9 * len(steps)) - 1]
        shares = (found["step_mean"], fmean(steps), within, steps[-1])
        yield f"| {name} | {devices} | {len(own)} | {' | '.join(f'{share:.1%}' for share in shares)} | {memory} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", metavar="FILE", nargs="+", type=Path)
    parser.add_argument("--json", action="store_true", help="only the line of JSON")
    asked = parser.parse_args()
    try:
        tables = [read_runs(path) for path in asked.files]
        rows = [figures(run, load_data_sheet(run.device)) for table in tables for run in table.runs]
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    skipped = [{"name": name, "needs": needs} for each in tables for name, needs in each.skipped]
    summary = errors(rows)
    if not asked.json:
        print(*by_publisher(rows), sep="\n")
        print(f"\n{len(rows)} rows; {len(skipped)} skipped" + (":" if skipped else ""))
        for row in skipped:
            print(f"  {row['name']}: needs {row['needs']}")
        print(", ".join(f"{name} {value:.3g}" for name, value in summary.items() if value is not None))
    print(json.dumps({"rows": rows, "errors": summary, "skipped": skipped}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
