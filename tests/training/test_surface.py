"""The trainer as a PaddleNLP user makes it: data sets of one's own, refusals, events in the stock order."""

import json
from itertools import groupby
from unittest.mock import patch

import numpy as np
import pytest

pytest.importorskip("paddle")

from paddle.distributed.fleet.base.topology import HybridCommunicateGroup
from paddlenlp.trainer import Trainer, TrainerCallback, TrainingArguments
from paddlenlp.transformers import LlamaConfig, LlamaForCausalLM
from paddlenlp.utils.log import logger

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.register import GalvatronTrainer, GalvatronTrainingArguments
from paddlenlp_galvatron.training.paddlenlp.trainer import MapData

from .test_trainer import MODEL, settings

LENGTH, VOCABULARY, SAMPLES = 16, 64, 32
TOKENS = np.random.default_rng(0).integers(VOCABULARY, size=(SAMPLES, LENGTH + 1))
PAIRS = [{"input_ids": row[:-1], "labels": row[1:]} for row in TOKENS]


class Received(TrainerCallback):
    """The names of all events."""

    def __init__(self):
        self.events = []


for _event in [name for name in dir(TrainerCallback) if name.startswith("on_")]:
    setattr(Received, _event, lambda self, *_, event=_event, **__: self.events.append(event))


def arguments(folder, **given) -> GalvatronTrainingArguments:
    plan = {"global_train_batch_size": 8, "chunks": 2}
    return GalvatronTrainingArguments(output_dir=str(folder / "out"), **{"max_steps": 4, **plan, **given})


def model_file(folder) -> str:
    (folder / "model.json").write_text(json.dumps(MODEL))
    return str(folder / "model.json")


def data(dataset, **given) -> MapData:
    return MapData("train_dataset", dataset, LENGTH, VOCABULARY, 4, **given)


def test_events_come_as_in_paddlenlps_own_trainer(tmp_path):
    steps = {
        "max_steps": 6,  # one pass and a half
        "save_steps": 2,
        "logging_steps": 2,
        "evaluation_strategy": "epoch",
    }
    ours, stock = Received(), Received()
    args = arguments(tmp_path, **steps)
    GalvatronTrainer(model_file(tmp_path), args, train_dataset=PAIRS, eval_dataset=PAIRS, callbacks=[ours]).train()
    fields = {name: value for name, value in MODEL.items() if name != "model_type"}
    args = TrainingArguments(
        output_dir=str(tmp_path / "stock"),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        disable_tqdm=True,
        report_to=[],
        **steps,
    )
    model = LlamaForCausalLM(LlamaConfig(**fields))
    Trainer(model=model, args=args, train_dataset=PAIRS, eval_dataset=PAIRS, callbacks=[stock]).train()
    # Evaluation has batches of its own size.
    assert [event for event, _ in groupby(ours.events)] == [event for event, _ in groupby(stock.events)]


@pytest.mark.parametrize(
    ("items", "masked"),
    [
        (list(TOKENS), 0),
        ([{"text": row} for row in TOKENS], 0),
        ([{"input_ids": row.tolist()} for row in TOKENS], 0),
        ([row[:-1] for row in TOKENS], 1),
        ([{**pair, "attention_mask": np.ones(LENGTH, int)} for pair in PAIRS], 0),
    ],
    ids=["arrays", "text", "lists", "without a last label", "whole masks"],
)
def test_a_sample_is_the_same_in_every_form(items, masked):
    expected, given = data(PAIRS).batch(1), data(items).batch(1)
    assert (given[0] == expected[0]).all()
    last = LENGTH - masked
    assert (given[1][:, :last] == expected[1][:, :last]).all() and (given[1][:, last:] == -100).all()


def test_passes_are_shuffled_as_paddlenlps_sampler_does_and_go_on_at_any_sample():
    from paddle.io import DistributedBatchSampler

    source = data(PAIRS[:6])
    reported = [row.tolist() for step in range(3) for row in source.batch(step)[0]]
    indices = []
    for epoch in range(2):
        sampler = DistributedBatchSampler(PAIRS[:6], 6, num_replicas=1, rank=0, shuffle=True)
        sampler.set_epoch(epoch)
        indices += next(iter(sampler))
    assert reported == [PAIRS[index]["input_ids"].tolist() for index in indices]
    on = data(PAIRS[:6])
    on.continue_at(5, 7)
    assert on.batch(5)[0][0].tolist() == reported[7]


def test_a_collator_makes_the_batch():
    def reversed_pairs(items):
        return {key: np.stack([item[key][::-1] for item in items]) for key in ("input_ids", "labels")}

    plain, collated = data(PAIRS).batch(0), data(PAIRS, collator=reversed_pairs).batch(0)
    assert (collated[0] == plain[0][:, ::-1]).all() and (collated[1] == plain[1][:, ::-1]).all()


@pytest.mark.parametrize(
    ("dataset", "says"),
    [
        (iter(PAIRS), "train_dataset: a list_iterator has no length"),
        ([], "train_dataset: is empty"),
        ([{"input_ids": row[:9]} for row in TOKENS], "input_ids has shape (9,) instead of (16,); a sample has 16"),
        ([{"input_ids": row[:-1], "labels": row} for row in TOKENS], "labels has shape (17,)"),
        ([{**pair, "position_ids": 0} for pair in PAIRS], "has position_ids, which the plan's engine does not take"),
        ([{"ids": row} for row in TOKENS], "has ids, which the plan's engine does not take"),
        ([row / 2 for row in TOKENS], "text: is no array of integers"),
        ([row + VOCABULARY for row in TOKENS], "but the model's are 0-63"),
        ([{**pair, "attention_mask": np.eye(LENGTH)[3].astype(int)} for pair in PAIRS], "attention_mask hides tokens"),
    ],
)
def test_what_is_no_sample_is_reported_by_its_number(dataset, says):
    with pytest.raises(UserError) as error:
        data(dataset).batch(0)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_a_batch_without_labels_is_refused(tmp_path):
    unlabelled = [{**pair, "labels": np.full(LENGTH, -100)} for pair in PAIRS]
    trainer = GalvatronTrainer(model_file(tmp_path), arguments(tmp_path), train_dataset=unlabelled)
    with pytest.raises(UserError, match="labels: all of a batch are -100"):
        trainer.train()


def test_evaluation_takes_every_sample_once(tmp_path):
    """Ten samples in batches of eight: a mean over their tokens, not over batches."""
    args = arguments(tmp_path, max_steps=1)
    trainer = GalvatronTrainer(model_file(tmp_path), args, train_dataset=PAIRS)
    halves = {"first": PAIRS[:8], "rest": PAIRS[8:10]}
    parts = trainer.evaluate(halves)
    whole = trainer.evaluate(PAIRS[:10], metric_key_prefix="all")
    assert whole["all_loss"] == pytest.approx((parts["eval_first_loss"] * 8 + parts["eval_rest_loss"] * 2) / 10)
    with pytest.raises(UserError, match="eval_dataset: missing"):
        trainer.evaluate()


def test_what_a_plans_engine_does_by_itself_is_refused_by_name(tmp_path):
    model, args = model_file(tmp_path), arguments(tmp_path)
    for name in ("criterion", "compute_metrics", "preprocess_logits_for_metrics"):
        with pytest.raises(UserError, match=f"{name}: cannot be overridden under a plan"):
            GalvatronTrainer(model, args, train_dataset=PAIRS, **{name: len})
    with pytest.raises(UserError, match="optimizers: "):
        GalvatronTrainer(model=model, args=args, train_dataset=PAIRS, optimizers=(object(), None))
    with pytest.raises(TypeError, match="train_data"):
        GalvatronTrainer(model, args, train_data=PAIRS)
    with pytest.raises(UserError, match="compute_loss: cannot be overridden under a plan"):
        type("Own", (GalvatronTrainer,), {"compute_loss": len})
    with pytest.raises(UserError, match="model: is a LlamaForCausalLM; give"):
        config = LlamaConfig(**{name: value for name, value in MODEL.items() if name != "model_type"})
        GalvatronTrainer(LlamaForCausalLM(config), args, train_dataset=PAIRS)
    with pytest.raises(UserError, match="args: missing; give GalvatronTrainingArguments"):
        GalvatronTrainer(model, train_dataset=PAIRS)
    with pytest.raises(UserError, match=r"num_cycles: 2\.0 would change nothing here"):
        GalvatronTrainer(model, arguments(tmp_path, num_cycles=2.0), train_dataset=PAIRS)
    with pytest.raises(UserError, match="args: settings of a whole run"):
        GalvatronTrainer(settings(tmp_path), args)
    with patch.object(logger, "warning") as warned:  # the Trainer's own words for arguments without an effect
        GalvatronTrainer(model, arguments(tmp_path, skip_profile_timer=False), train_dataset=PAIRS)
    reported = [call.args[0] for call in warned.call_args_list]
    assert any("no effect here: skip_profile_timer (" in line for line in reported)
    assert any("one strategy for all layers, by global_train_batch_size, chunks" in line for line in reported)
    args = arguments(tmp_path, logging_strategy="epoch", metrics_output_path=str(tmp_path / "metrics"))
    trainer = GalvatronTrainer(LlamaConfig(**config.to_dict()), args, train_dataset=PAIRS)
    assert trainer.args.logging_strategy.value == "epoch" and (tmp_path / "metrics").is_dir()
    for name in ("predict", "training_step", "compute_loss", "create_optimizer_and_scheduler", "evaluation_loop"):
        with pytest.raises(UserError, match=f"{name}: is not available under a plan"):
            getattr(trainer, name)()


def test_every_public_question_of_paddles_group_is_answered_or_refused_by_name(tmp_path):
    from paddle.distributed import fleet

    GalvatronTrainer(model_file(tmp_path), arguments(tmp_path), train_dataset=PAIRS)
    group = fleet.get_hybrid_communicate_group()
    axes, kinds = ("pipe", "data", "sharding", "sep", "model"), ("rank", "world_size")
    answered = {f"get_{axis}_parallel_{kind}" for axis in axes for kind in kinds} | {"get_stage_id", "get_global_rank"}
    for name in [name for name in dir(HybridCommunicateGroup) if not name.startswith("_")]:
        if name in answered:
            assert getattr(group, name)() == name.endswith("size")
        else:
            with pytest.raises(UserError, match=f"{name} is not answered under a plan"):
                getattr(group, name)
    assert group.nranks == 1 and not hasattr(group, "get_unheard_of_degree")


@pytest.mark.parametrize("named", ["", "config.json"], ids=["folder", "config.json"])
def test_a_runs_folder_has_its_models_tokenizer_and_templates(tmp_path, named):
    own = {"chat_template.json", "vocab.txt", "additional_chat_templates/tools.jinja"}
    model = tmp_path / "model"
    (model / "additional_chat_templates").mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(MODEL))
    for name in own:
        (model / name).write_text(f"of {name}")
    trainer = GalvatronTrainer(str(model / named), arguments(tmp_path, save_steps=2), train_dataset=PAIRS)
    trainer.train(resume_from_checkpoint=None)
    for _ in range(2):  # the second one in place of the first
        trainer.save_model()
    for folder in (tmp_path / "out", *(tmp_path / "out" / "checkpoints").iterdir()):
        assert {name: (folder / name).read_text() for name in own} == {name: f"of {name}" for name in own}
        assert json.loads((folder / "config.json").read_text()).items() >= MODEL.items()


def test_a_script_as_paddlenlps_own_runs_to_its_end(tmp_path, capfd):
    """The calls of PaddleNLP's run_pretrain.py, from training to the saved state; then there is nothing to do."""
    trainer = GalvatronTrainer(model_file(tmp_path), arguments(tmp_path, save_steps=2), train_dataset=PAIRS)
    result = trainer.train(resume_from_checkpoint=None)
    trainer.save_model()
    trainer.log_metrics("train", result.metrics)
    trainer.save_metrics("train", result.metrics)
    trainer.save_state()
    out = tmp_path / "out"
    assert {"config.json", "model.safetensors", "train_results.json", "trainer_state.json"} <= {
        file.name for file in out.iterdir()
    }
    assert json.loads((out / "trainer_state.json").read_text())["global_step"] == 4
    loaded = LlamaForCausalLM.from_pretrained(str(out), convert_from_torch=True)
    assert loaded.state_dict()["llama.layers.0.mlp.up_proj.weight"].numpy() == pytest.approx(
        trainer.model.state_dict()["llama.layers.0.mlp.up_proj.weight"].numpy()
    )
    again = GalvatronTrainer(model_file(tmp_path), arguments(tmp_path), train_dataset=PAIRS)
    assert again.train(resume_from_checkpoint=True).metrics["train_loss"] == 0 and again.state.global_step == 4
    assert "nothing to do: " in capfd.readouterr().err
    fresh = GalvatronTrainer(model_file(tmp_path), arguments(tmp_path), train_dataset=PAIRS)
    assert fresh.train(resume_from_checkpoint=False).training_loss == pytest.approx(result.training_loss)
