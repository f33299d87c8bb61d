"""The optimizer's states on the host, planned by fit."""

import json

import pytest

from paddlenlp_galvatron.cli.main import main

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
    assert away["verdict"] == "fits" and 12 < away["memory_estimate_gib"] < away["memory_bound_gib"] <= 16


def test_activations_on_the_host_gain_where_memory_is_short_and_change_nothing_where_it_is_not(capsys):
    short, ample = ("--memory_constraint", "24"), ("--batch", "8", "--seq_length", "512")
    for asked, gains in ((short, True), (ample, False)):
        plain, away = (row(capsys, *asked, "--offload_activations", use) for use in "01")
        assert ("offload_enc" in away["plan"]) is gains
        assert away["tokens_per_s_per_gpu"] >= plain["tokens_per_s_per_gpu"] * (1.02 if gains else 1)
