"""`galvatron validate`: run plans and compare predictions with measurements."""

from json import dumps
from typing import Any

from paddlenlp_galvatron.base.errors import GalvatronError, UserError
from paddlenlp_galvatron.base.printing import Console, say
from paddlenlp_galvatron.base.writing import write_text
from paddlenlp_galvatron.check.validation.work import ValidateOptions
from paddlenlp_galvatron.plan import load_model

from .command import App, FromFile, say_note

app = App()


@app.command(FromFile, ValidateOptions, positional={"model_size": "MODEL"})
def validate(values: dict[str, Any], json: bool) -> None:
    """Draw random plans, run each, and compare predictions with measurements. Exit code 1 if the accuracy is
    worse than the given limits."""
    options = ValidateOptions.from_values(values)
    load_model(options.model_size).trained()  # reports faults before Paddle is imported
    if not options.profiles.is_dir():
        raise UserError(f"profiles: no folder {options.profiles}; measure with galvatron profile all")
    from paddlenlp_galvatron.check.validation.accuracy import accuracy_json, accuracy_tables, shortcomings
    from paddlenlp_galvatron.check.validation.validate import Validation

    validation = Validation(options, say_note)
    validation.run()
    if options.node_rank:  # the first node writes the journal
        return
    accuracy = validation.accuracy()
    answer = accuracy_json(accuracy)
    write_text(options.output / "validation.json", dumps(answer, indent=1) + "\n")
    if json:
        say(dumps(answer))
    else:
        console = Console(soft_wrap=True)
        for item in accuracy_tables(accuracy):
            console.print(item)
        say(f"{options.output}: validation.json")
    if short := shortcomings(accuracy, options):
        raise GalvatronError("; ".join(short))
