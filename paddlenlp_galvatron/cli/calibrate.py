"""`galvatron calibrate`: fits a data sheet to measured steps."""

from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import Any

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.base.printing import say
from paddlenlp_galvatron.base.writing import write_text
from paddlenlp_galvatron.check.calibration.fit import calibrate as fitted
from paddlenlp_galvatron.check.calibration.sources import read_runs
from paddlenlp_galvatron.options.group import Options, Paths
from paddlenlp_galvatron.profiles.data_sheet import load_data_sheet

from .command import App, FromFile, say_note

app = App()


class CalibrateOptions(Options):
    """Measured runs, and the files to write."""

    runs: Paths
    plans: Paths = ()
    device: str | None = None
    model_size: str | None = None
    output: Path = Path("node.json")


@app.command(FromFile, CalibrateOptions, positional={"runs": "RUNS"})
def calibrate(values: dict[str, Any], json: bool) -> None:
    """Fit the few physical numbers of a data sheet to measured steps, and write it; one run helps, three are usually
    enough."""
    options = CalibrateOptions.from_values(values)
    plans = list(options.plans)
    runs = []
    for source in options.runs:
        plan = plans.pop(0) if plans and source.suffix not in (".csv", ".json") else None
        table = read_runs(source, plan, options.model_size, options.device)
        runs += table.runs
        for name, needs in table.skipped:
            say_note(f"{source}: {name} skipped: needs {needs}")
    if plans:
        raise UserError(f"plans: {len(plans)} more than logs; give one plan for each train_log.jsonl")
    devices = {options.device or run.device for run in runs}
    if len(devices) > 1:
        raise UserError(f"device: the runs are of {', '.join(sorted(devices))}; name one, or give those of one alone")
    if not devices:
        raise UserError("runs: none that can be priced; give a log, a validation.json or a table with other rows")
    fit = fitted(runs, load_data_sheet(devices.pop()))
    if fit.refusal:
        raise UserError(fit.refusal)
    write_text(options.output, fit.sheet.model_dump_json(indent=2, exclude_none=True) + "\n")
    if json:
        errors = {"before": fit.before, "after": fit.after, "each_from_the_others": fit.apart}
        numbers = [asdict(number) for number in fit.numbers]
        say(dumps({"numbers": numbers, "errors": errors, "output": str(options.output)}))
        return
    for line in fit.lines():
        say(line)
    say(f"written: {options.output}; give it as --device to fit, search and what-if")
