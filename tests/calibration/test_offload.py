"""The optimizer's states on the host: planned by fit and search, refused by training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.cli.main import main
from paddlenlp_galvatron.plan import read_plan
from paddlenlp_galvatron.plan.check import require_trainable

FIT = ["fit", "qwen3-8b", "--gpus", "8", "--device", "h800", "--batch", "128", "--json"]


def row(capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, object]:
    main([*FIT, *more])
    return json.loads(capsys.readouterr().out)["rows"][0]  # type: ignore[no-any-return]


def test_fit_says_whether_a_model_fits_is_at_risk_or_does_not_fit(capsys):
    verdicts = {gib: row(capsys, "--memory_constraint", str(gib)) for gib in (79, 24, 8)}
    assert {gib: one["verdict"] for gib, one in verdicts.items() if gib != 24} == {79: "fits", 8: "does not fit"}
    least = verdicts[8]["memory_bound_gib"]  # of the plan that needs least
    assert row(capsys, "--memory_constraint", f"{least + 0.5:.2f}")["verdict"] == "fits"
    assert row(capsys, "--memory_constraint", f"{least - 0.3:.2f}")["verdict"] == "at risk"


def test_with_the_optimizer_on_the_host_a_model_fits_a_smaller_card(capsys):
    small = ("--memory_constraint", "16")
    assert not row(capsys, *small)["fits"]
    away = row(capsys, *small, "--offload_optimizer", "1")
    assert away["verdict"] == "fits" and away["memory_estimate_gib"] < 12 and 15 < away["memory_bound_gib"] <= 16
    # By the estimate alone, but the allocator may give activations none of the place that the first update took.
    less = row(capsys, "--memory_constraint", "13", "--offload_optimizer", "1")
    assert less["verdict"] == "at risk" and less["memory_estimate_gib"] < 13 < less["memory_bound_gib"]


def test_training_refuses_a_plan_that_was_searched_with_it(tmp_path, capsys):
    profiles, path = tmp_path / "profiles", tmp_path / "plan.json"
    model = ["--model_size", "qwen2.5-0.5b", "--seq_length", "512"]
    assert (
        main(["profile", "all", "--analytic", "h800", *model, "--num_gpus_per_node", "2", "--output", str(profiles)])
        == 0
    )
    found = ["search", "--profiles", str(profiles), *model, "--num_gpus_per_node", "2", "--settle_bsz", "8"]
    found += ["--memory_constraint", "40", "--log_dir", str(tmp_path), "--output_config_path", str(path)]
    assert main([*found, "--offload_optimizer", "1"]) == 0
    assert "offload_optimizer: planned only" in capsys.readouterr().out
    with pytest.raises(UserError, match="offload_optimizer, which can be planned but not trained"):
        require_trainable(read_plan(Path(path)))
