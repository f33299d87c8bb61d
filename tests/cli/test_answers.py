"""Every answer with `--json` has a published schema. The fixture `galvatron` holds those of searches against theirs."""

import json

import jsonschema
import pytest
from small_model import MODEL

from paddlenlp_galvatron.cli.main import commands
from paddlenlp_galvatron.report.answers import answer_schemas


def test_every_command_with_json_has_a_schema():
    assert set(answer_schemas()) == {name for name, command in commands().items() if "json" in command.switches}
    for schema in answer_schemas().values():
        jsonschema.Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize(
    "words",
    [
        pytest.param("plan show plan.json", id="show"),
        pytest.param("plan check plan.json", id="check"),
        pytest.param("plan to-paddlenlp plan.json", id="to PaddleNLP"),
        pytest.param("plan to-paddlefleet plan.json", id="to PaddleFleet"),
        pytest.param("plan trace plan.json --device h100", id="trace"),
        pytest.param("report plan.json --device h100 --time_limit 1", id="report"),
        pytest.param("doctor", id="doctor"),
        pytest.param("data prepare text.txt --output data --vocab_size 300", id="data"),
    ],
)
def test_an_answer_is_as_its_schema_says(words, galvatron, tmp_path):
    (tmp_path / "model.json").write_text(json.dumps(MODEL))
    (tmp_path / "text.txt").write_text("some words of a text " * 200)
    sizes = "--world_size 2 --global_train_batch_size 4 --seq_length 16"
    made = galvatron("plan", "uniform", "model.json", *sizes.split(), "--output", "plan.json", "--json")
    jsonschema.validate(json.loads(made.out), answer_schemas()["plan uniform"])
    ran = galvatron(*words.split(), "--json")
    text = ran.out.strip()
    answer = json.loads(text if text.startswith("{\n") else text.splitlines()[-1])
    [name] = [name for name in answer_schemas() if f"{words} ".startswith(f"{name} ")]
    jsonschema.validate(answer, answer_schemas()[name])
    assert (
        set(answer_schemas()[name].get("properties", {})) <= {*answer, "part", "ranks", "seconds"} or name == "doctor"
    )
