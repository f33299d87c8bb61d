"""PaddleNLP's Trainer around a plan's engine: its callbacks, evaluation, epochs, saving."""

import json
import signal
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("paddle")

from paddlenlp.trainer import TrainerCallback
from paddlenlp.transformers import CosineAnnealingWithWarmupDecay
from small_model import MODEL

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.base.process import stop_signals
from paddlenlp_galvatron.options.uniform import uniform_plan
from paddlenlp_galvatron.plan import Assumptions, write_plan
from paddlenlp_galvatron.training import loop as training_loop
from paddlenlp_galvatron.training.checkpoint.stored import whole_checkpoints
from paddlenlp_galvatron.training.paddlenlp.trainer import GalvatronTrainer
from paddlenlp_galvatron.training.recipe import Recipe
from paddlenlp_galvatron.training.settings import TrainSettings
from paddlenlp_galvatron.training.step_log import read_log

BATCH = 4


class Received(TrainerCallback):
    """Writes down its events; stops the run where it should."""

    def __init__(self, stop_after: int | None = None):
        self.events: list[str] = []
        self.logs: list[dict] = []
        self._stop_after = stop_after

    def on_epoch_begin(self, args, state, control, **_):
        self.events.append(f"epoch {state.global_step}")

    def on_step_begin(self, args, state, control, model, optimizer, lr_scheduler, **_):
        assert len(model.parameters()) == len(optimizer._parameter_list)
        assert lr_scheduler.last_lr == optimizer.get_lr()

    def on_step_end(self, args, state, control, **_):
        self.events.append(f"step {state.global_step}")
        control.should_training_stop |= state.global_step == self._stop_after

    def on_save(self, args, state, control, **_):
        self.events.append("save")

    def on_evaluate(self, args, state, control, metrics, **_):
        self.events.append("evaluate")
        assert metrics["eval_loss"] > 0

    def on_log(self, args, state, control, logs, **_):
        self.logs.append(dict(logs))


def settings(folder: Path, **given) -> TrainSettings:
    (folder / "model.json").write_text(json.dumps(MODEL))
    assumed = Assumptions(seq_length=16)
    write_plan(
        uniform_plan(layers=2, world_size=1, global_train_batch_size=BATCH, assumed=assumed), folder / "plan.json"
    )
    fields = {"plan": folder / "plan.json", "model": str(folder / "model.json"), "output_dir": folder / "out"}
    fields["input_dir"] = "random"
    return TrainSettings.from_values({**fields, "world_size": 1, "max_steps": 4, **given})


def records(run: TrainSettings) -> list[dict]:
    return [*map(dict, read_log(run.log))]


def test_callbacks_receive_steps_logs_evaluations_and_saves(tmp_path):
    run = settings(
        tmp_path, evaluation_strategy="steps", eval_steps=2, max_evaluate_steps=2, save_steps=3, logging_steps=2
    )
    received = Received()
    result = GalvatronTrainer(run, callbacks=[received]).train()
    expected = ["epoch 0", "step 1", "step 2", "evaluate", "step 3", "save", "step 4", "evaluate", "save"]
    assert received.events == expected
    assert [("loss" in logs, "eval_loss" in logs) for logs in received.logs[:-1]] == [(True, False), (False, True)] * 2
    losses = [record["loss"] for record in records(run)]
    assert received.logs[0]["loss"] == pytest.approx(sum(losses[:2]) / 2)
    assert result.training_loss == pytest.approx(sum(losses) / 4)
    assert [record.get("eval_loss") for record in records(run)][1::2] == [
        logs["eval_loss"] for logs in received.logs if "eval_loss" in logs
    ]
    assert sorted(folder.name for folder in run.checkpoints.iterdir()) == ["step-00000003", "step-00000004"]


def test_a_step_takes_as_long_as_its_data_and_not_as_long_as_an_evaluation(tmp_path, monkeypatch):
    trainer = GalvatronTrainer(settings(tmp_path, evaluation_strategy="steps", eval_steps=2, max_evaluate_steps=1))
    rows, evaluate, first_done = trainer.run.data.rows, trainer.loop.evaluate, threading.Event()

    def slow(step, wanted):
        if step == 1 and first_done.wait(60):
            time.sleep(0.3)
        return rows(step, wanted)

    monkeypatch.setattr(trainer.run.data, "rows", slow)
    monkeypatch.setattr(trainer.loop, "evaluate", lambda: (time.sleep(2.0), evaluate())[1])
    steps = trainer.steps()
    next(steps)
    first_done.set()
    second, third, _ = list(steps)
    assert second["step_time_s"] >= second["data_s"] >= 0.3
    assert third["step_time_s"] < 2.0


def test_the_next_rows_are_read_while_a_step_computes_and_none_after_the_last(tmp_path, monkeypatch):
    trainer = GalvatronTrainer(settings(tmp_path))
    rows, compute, read = (
        trainer.run.data.rows,
        trainer.run.engine.forward_backward,
        [threading.Event() for _ in range(5)],
    )

    def reads(step, wanted):
        read[step].set()
        return rows(step, wanted)

    def computes(share):
        step = trainer.run.engine.steps_done
        assert step == 3 or read[step + 1].wait(60)
        return compute(share)

    monkeypatch.setattr(trainer.run.data, "rows", reads)
    monkeypatch.setattr(trainer.run.engine, "forward_backward", computes)
    assert len(list(trainer.steps())) == 4 and not read[4].is_set()


def test_what_a_read_ahead_finds_wrong_is_reported_at_its_step(tmp_path, monkeypatch):
    trainer = GalvatronTrainer(settings(tmp_path))
    rows = trainer.run.data.rows

    def breaks(step, wanted):
        if step == 2:
            raise UserError("step 2: the data have changed")
        return rows(step, wanted)

    monkeypatch.setattr(trainer.run.data, "rows", breaks)
    steps = trainer.steps()
    assert [next(steps)["step"] for _ in range(2)] == [1, 2]
    with pytest.raises(UserError, match="the data have changed"):
        next(steps)


def test_a_callback_stops_a_run_and_another_one_continues(tmp_path):
    straight = settings(tmp_path, output_dir=tmp_path / "straight")
    GalvatronTrainer(straight).train()
    run = settings(tmp_path)
    GalvatronTrainer(run, callbacks=[Received(stop_after=2)]).train()
    assert [record["step"] for record in records(run)] == [1, 2]
    received = Received()
    GalvatronTrainer(run, callbacks=[received]).train()
    assert received.events == ["epoch 2", "step 3", "step 4", "save"]
    assert [record["loss"] for record in records(run)] == [record["loss"] for record in records(straight)]


@pytest.mark.parametrize("saving", [{"save_strategy": "epoch"}, {"save_steps": 1}], ids=str)
def test_epochs_are_passes_over_the_training_split(tmp_path, prefix, saving):
    run = settings(
        tmp_path,
        input_dir=str(prefix),
        split="8,2,0",
        max_steps=-1,
        num_train_epochs=2.0,
        evaluation_strategy="epoch",
        **saving,
    )
    (tmp_path / "model.json").write_text(json.dumps({**MODEL, "vocab_size": 512}))
    received = Received()
    trainer = GalvatronTrainer(run, callbacks=[received])
    steps = trainer.run.data.samples // BATCH
    trainer.train()
    assert received.events.count("save") == (2 if "save_strategy" in saving else 2 * steps)
    assert received.events.count("evaluate") == 2
    assert [event for event in received.events if event.startswith("epoch")] == ["epoch 0", f"epoch {steps}"]
    assert trainer.state.epoch == 2.0
    assert len(records(run)) == 2 * steps
    assert [record["step"] for record in records(run) if "eval_loss" in record] == [steps, 2 * steps]


def test_the_rate_is_that_of_paddlenlps_schedule(tmp_path):
    recipe = Recipe(learning_rate=1e-3, min_learning_rate=1e-4, lr_scheduler_type="cosine", warmup_ratio=0.25).over(8)
    stock = CosineAnnealingWithWarmupDecay(1e-3, 1e-4, 2, 8, last_epoch=0)
    for step in range(10):
        assert recipe.rate_at(step) == pytest.approx(stock.get_lr())
        stock.step()


def test_tensorboard_gets_what_is_logged(tmp_path):
    """With the extra [log]."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    pytest.importorskip("tensorboardX")
    chosen = settings(tmp_path, report_to="tensorboard", logging_dir=tmp_path / "board", logging_steps=1)
    GalvatronTrainer(chosen).train()
    losses = [record["loss"] for record in records(chosen)]
    events = reader.EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    read = [scalar.value for scalar in events.Scalars("train/loss")]
    assert losses and read == pytest.approx(losses, rel=1e-4)
    assert "train/learning_rate" in events.Tags()["scalars"]


def test_a_run_begun_again_is_not_mistaken_for_the_one_before(tmp_path):
    run = settings(tmp_path, save_steps=1)
    GalvatronTrainer(run).train()
    fresh = settings(tmp_path, save_steps=1, resume_from_checkpoint="none", seed=7)
    GalvatronTrainer(fresh, callbacks=[Received(stop_after=2)]).train()
    assert [folder.name for folder in whole_checkpoints(run.checkpoints)] == ["step-00000002", "step-00000001"]
    assert len(list(run.checkpoints.glob("left-*-step-00000004"))) == 1
    GalvatronTrainer(settings(tmp_path, seed=7)).train()
    assert [record["step"] for record in records(run)] == [1, 2, 3, 4]


def test_a_folder_in_which_another_run_writes_is_refused_no_matter_who_started_the_ranks(tmp_path, monkeypatch):
    """PaddleNLP's launcher takes no lock before."""
    monkeypatch.setattr(training_loop, "RESTART_S", 0.0)
    run = settings(tmp_path)
    trainer, half_written = GalvatronTrainer(run), run.checkpoints / "step-00000002.part"
    half_written.mkdir(parents=True)
    with run.folder_locked(), pytest.raises(UserError, match="out: is in use by process"):
        trainer.train()
    assert half_written.exists() and not run.log.exists()


def test_a_signal_that_comes_again_when_all_is_saved_changes_nothing():
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with stop_signals() as reported:
            pass
        assert (reported, signal.getsignal(signal.SIGTERM)) == ([], signal.SIG_DFL)
        with stop_signals() as reported:
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert reported == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_all_checkpoints_stay_unless_a_limit_is_given_and_each_that_goes_is_named(tmp_path, capfd):
    GalvatronTrainer(settings(tmp_path, save_steps=1)).train()
    steps = tmp_path / "out" / "checkpoints"
    assert len(list(steps.iterdir())) == 4 and "removed " not in capfd.readouterr().err
    again = {"resume_from_checkpoint": "none", "save_total_limit": 3, "evaluation_strategy": "steps", "eval_steps": 4}
    GalvatronTrainer(settings(tmp_path, save_steps=1, max_evaluate_steps=1, **again)).train()
    stated = capfd.readouterr().err
    assert f"removed {steps / 'step-00000001'}, as save_total_limit is 3\n" in stated
    assert "evaluated after step 4: eval_loss " in stated
