"""The report where memory ran out: predicted next to measured by stage, and remedies."""

from dataclasses import replace

from rich.console import Console

from paddlenlp_galvatron.options.uniform import uniform_plan
from paddlenlp_galvatron.plan import Plan
from paddlenlp_galvatron.report.measured import out_of_memory_report

RECORDS = [{"peak_memory_mib": [900.0, 950.0, 700.0, 720.0]}, {"peak_memory_mib": [910.0, 940.0, 730.0, 700.0]}]


def plan(predicted: bool = True, **options) -> Plan:
    made = uniform_plan(layers=4, world_size=4, global_train_batch_size=8, pp_deg=2, chunks=2, **options)
    stages = [{"memory_mib": 1024.0}, {"memory_mib": 2048.0}]
    searched = {"memory_constraint_gb": 4.0}
    return replace(made, metadata={"predicted": {"stages": stages}, "searched_from": searched} if predicted else {})


def printed(*arguments) -> list[str]:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(out_of_memory_report(*arguments))
    return [" ".join(line.split()) for line in capture.get().splitlines()]


def test_each_stage_has_predicted_beside_measured_memory():
    _, first, last, *_ = printed(plan(), RECORDS, 3, 1500.0)
    assert first == "0 1.00 0.928"
    assert last == "1 2.00 1.46 rank 3 wanted more"


def test_a_rank_that_left_nothing_is_recognized_by_the_log():
    assert printed(plan(), RECORDS, 2, None)[2] == "1 2.00 0.713 rank 2 wanted more"
    assert printed(plan(), [], 2, None)[1:3] == ["0 1.00 no step done", "1 2.00 no step done rank 2 wanted more"]
    assert printed(plan(predicted=False), RECORDS, 2, 800.0)[2] == "1 not in the plan 0.781 rank 2 wanted more"


def test_the_advised_budget_is_below_what_is_known_not_to_do():
    advice = "\n".join(printed(plan(), RECORDS, 3, 1500.0))  # the device holds less than was thought
    assert "galvatron search --memory_constraint 1.32 instead of 4" in advice  # 0.9 of 1500 MiB
    assert "prediction is too low" not in advice
    advice = "\n".join(printed(plan(), RECORDS, 0, 1500.0))  # the stage needs more than was thought
    assert "galvatron search --memory_constraint 0.9 instead of 4" in advice  # 0.9 of the predicted 1024 MiB
    assert "galvatron profile memory" in advice


def test_only_what_is_left_to_do_is_advised():
    advice = "\n".join(printed(plan(), RECORDS, 3, 1500.0))
    assert "2 of its 2 keep activations" in advice and "zero3" in advice
    advice = "\n".join(printed(plan(global_checkpoint=True, sdp=True), RECORDS, 3, 1500.0))
    assert "activations" not in advice and "zero3" not in advice
