"""A fault of one rank ends all of them, by name; a fault of numbers leaves the weights alone."""

import json
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("paddle")

import paddle

from paddlenlp_galvatron.base.errors import GalvatronError
from paddlenlp_galvatron.check.parity.parity import batch_of, small_case
from paddlenlp_galvatron.launch.processes import LaunchError, launch
from paddlenlp_galvatron.model import config_of
from paddlenlp_galvatron.plan import Precision, write_plan
from paddlenlp_galvatron.runtime.engine import Engine
from paddlenlp_galvatron.runtime.setup import ModelSetup
from paddlenlp_galvatron.training.paddlenlp.trainer import GalvatronTrainer
from paddlenlp_galvatron.training.settings import TrainSettings

from .plans import plan

FAULTY_RANK = 2  # of the second stage
KILLED = f"rank {FAULTY_RANK} was ended by signal 9"
TIMEOUT_S = 600.0


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("p2p", KILLED),
        *(pytest.param(place, KILLED, marks=pytest.mark.slow) for place in ("forward", "backward", "optimizer")),
        ("shape", f"^rank {FAULTY_RANK} failed in step 2: "),
    ],
)
def test_a_rank_that_fails_ends_all_and_is_named(tmp_path, place, message):
    with pytest.raises(LaunchError, match=message):
        launch(f"{__package__}.faulty_worker", [place, str(FAULTY_RANK)], 4, tmp_path / "log", TIMEOUT_S)


@pytest.fixture
def engine_and_case():
    case = small_case(plan(1, "1 1"), "llama", "adamw")
    return Engine(ModelSetup.of(case.plan, case.shape, case.seq_length)), case


def poison(engine: Engine, value: float) -> None:
    with paddle.no_grad():
        engine.trainables[0].gradient[0] = value


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_stay_when_a_gradient_is_no_number(engine_and_case, value):
    engine, case = engine_and_case
    optimizer = case.recipe.build(engine.tensors, engine.decaying)
    engine.forward_backward(batch_of(case, 0))
    before = [tensor.numpy().copy() for tensor in engine.tensors]
    poison(engine, value)
    assert not np.isfinite(engine.update(optimizer, 1.0))
    assert all((old == new.numpy()).all() for old, new in zip(before, engine.tensors, strict=True))
    assert all(trainable.gradient is None for trainable in engine.trainables)
    engine.forward_backward(batch_of(case, 1))
    assert np.isfinite(engine.update(optimizer, 1.0))
    assert any((old != new.numpy()).any() for old, new in zip(before, engine.tensors, strict=True))


@pytest.fixture
def diverging(monkeypatch):
    """Makes the second step's loss NaN."""
    forward_backward = Engine.forward_backward
    calls = []

    def poisoned(self, batch):
        loss = forward_backward(self, batch)
        calls.append(loss)
        if len(calls) == 2:
            poison(self, float("nan"))
            return float("nan")
        return loss

    monkeypatch.setattr(Engine, "forward_backward", poisoned)


def settings(tmp_path, **given) -> TrainSettings:
    case = small_case(plan(1, "1 1"), "llama")
    write_plan(case.plan, tmp_path / "plan.json")
    (tmp_path / "model.json").write_text(json.dumps(config_of(case.shape)))
    return TrainSettings(
        plan=tmp_path / "plan.json",
        model=str(tmp_path / "model.json"),
        output_dir=tmp_path,
        max_steps=3,
        input_dir="random",
        world_size=1,
        **given,
    )


def test_a_run_stops_at_a_loss_that_is_no_number(tmp_path, diverging):
    with pytest.raises(GalvatronError, match=r"step 2: the loss is nan.*--on_nonfinite skip"):
        list(GalvatronTrainer(settings(tmp_path)).steps())


def test_a_run_leaves_such_a_step_out_when_asked(tmp_path, diverging):
    records = list(GalvatronTrainer(settings(tmp_path, on_nonfinite="skip")).steps())
    assert [np.isfinite(record["grad_norm"]) for record in records] == [True, False, True]
    assert np.isfinite(records[2]["loss"])


def test_a_norm_of_exactly_nothing_is_reported_once(tmp_path, capsys):
    skips = settings(tmp_path).nonfinite_guard(scaled=False)
    for step, norm in enumerate((0.5, 0.0, 0.0)):
        skips.count(step, 4.0, norm)
    assert capsys.readouterr().err.startswith("warning: step 1: the norm of the gradients is exactly 0")
    skips.count(3, 4.0, 0.0)
    assert not capsys.readouterr().err


@pytest.fixture
def hopeless(monkeypatch):
    """Makes every loss but the first NaN."""
    forward_backward = Engine.forward_backward
    calls = []

    def poisoned(self, batch):
        loss = forward_backward(self, batch)
        calls.append(loss)
        if len(calls) > 1:
            poison(self, float("nan"))
        return loss

    monkeypatch.setattr(Engine, "forward_backward", poisoned)
    return calls


def test_a_run_that_leaves_most_steps_out_ends(tmp_path, hopeless):
    run = settings(tmp_path, on_nonfinite="skip", max_skipped=4).model_copy(update={"max_steps": 30})
    with pytest.raises(GalvatronError, match=r"step 6: 5 of the latest 6 steps were skipped, more than"):
        list(GalvatronTrainer(run).steps())
    assert len(hopeless) == 6


def test_nothing_is_saved_of_a_run_that_never_advanced(tmp_path, hopeless):
    hopeless.append(0.0)
    run = settings(tmp_path, on_nonfinite="skip", save_steps=1)
    with pytest.raises(GalvatronError, match="all 3 steps were skipped"):
        list(GalvatronTrainer(run).steps())
    assert not list(tmp_path.glob("checkpoints/step-*"))


def test_fp16_lowers_its_loss_scale_until_gradients_fit():
    case = small_case(plan(1, "1 1"), "llama")
    fp16 = replace(case.plan, assumed=replace(case.plan.assumed, mixed_precision=Precision.FP16))
    engine = Engine(ModelSetup.of(fp16, case.shape, case.seq_length), loss_scale=2.0**24)
    optimizer = case.recipe.build(engine.tensors, engine.decaying)
    norms = []
    for step in range(12):
        engine.forward_backward(batch_of(case, step))
        norms.append(engine.update(optimizer, 1.0))
    finite = [bool(np.isfinite(norm)) for norm in norms]
    assert not finite[0] and finite.count(True) > 3  # a step at the edge may overflow again
    assert engine.scaler is not None and engine.scaler.scale == 2.0 ** (24 - finite.count(False))
