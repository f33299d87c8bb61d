"""`galvatron fit`: how many GPUs a model needs for a task, and how fast each number of GPUs is. Runs nothing."""

from json import dumps
from typing import Any

from paddlenlp_galvatron.base.errors import Infeasible, UserError
from paddlenlp_galvatron.base.printing import Console, say
from paddlenlp_galvatron.model import preset_names
from paddlenlp_galvatron.options.prices import LengthOptions
from paddlenlp_galvatron.plan import load_model
from paddlenlp_galvatron.planner.fit import PRECISION, Fit, FitOptions, hints_of
from paddlenlp_galvatron.planner.fit import fit as find_rows
from paddlenlp_galvatron.profiles.data_sheet import data_sheets
from paddlenlp_galvatron.report.fit import explain, heading, hint_lines, memory, speeds, summary

from .command import JSON, App, FromFile, say_note
from .planning import watched, with_lengths

app = App()


@app.command(
    FromFile, FitOptions, LengthOptions, positional={"model_size": "MODEL"}, switches=(*JSON, "list"), shared=PRECISION
)
def fit(values: dict[str, Any], json: bool, **switches: bool) -> None:
    """Search the fastest plan on each number of GPUs, from a data sheet or measured profiles. Exit code 3 if none
    fits."""
    if switches["list"]:
        say(known(json))
        return
    args = FitOptions.from_values(values)
    shape = load_model(args.model_size)
    length = args.of(shape).tokens_of_a_sample
    options = FitOptions.from_values(with_lengths(values, length, shape.vocab_size, say_note)).of(shape)
    notes: dict[str, None] = {}
    fits: list[Fit] = []
    console = Console(soft_wrap=True)
    in_turn = not json and len(options.device or ()) < 2  # print each row when it is ready
    with watched() as watch:
        for row in find_rows(shape, options, notes.setdefault, watch):
            if in_turn:
                for line in () if fits else heading([row], shape, options):
                    console.print(line)
                console.print(speeds([row], fits[-1] if fits else None, shape, options))
            fits.append(row)
    hints = hints_of(fits, options)
    for note in notes:
        say_note(note)
    if json:
        say(dumps(summary(fits, shape, options, hints)))
    else:
        items = (
            (*memory(fits, shape, options), *hint_lines(fits, hints))
            if in_turn
            else explain(fits, shape, options, hints)
        )
        console.print(*items, sep="\n")
    if not any(row_fit.best for row_fit in fits):
        most = fits[-1]
        if any(row_fit.undecided for row_fit in fits):
            raise UserError("time_limit, effort: no plan was found within them; raise them, or take more GPUs")
        why = f"{most.held}; use more GPUs" if most.held else "no strategy splits batch, heads and GPUs evenly"
        raise Infeasible(f"no plan fits: on {most.gpus} GPUs {why}")


def known(json: bool) -> str:
    """Presets by family, and data sheets."""
    presets: dict[str, list[str]] = {}
    for name in preset_names():
        presets.setdefault(name.partition("-")[0], []).append(name)
    if json:
        return dumps({"models": preset_names(), "devices": sorted(data_sheets())})
    families = [f"{family:<9} {', '.join(names)}" for family, names in presets.items()]
    return "\n".join(["models", *families, "devices", ", ".join(sorted(data_sheets()))])
