"""An option of training changes rates, updates, batches, steps or events: none is read and then dropped."""

import json
from collections.abc import Iterator
from contextlib import chdir, redirect_stderr
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("paddle")

import paddle
from small_model import MODEL

from paddlenlp_galvatron.base.errors import GalvatronError
from paddlenlp_galvatron.options.group import canonical_options
from paddlenlp_galvatron.runtime.batch import samples_of
from paddlenlp_galvatron.training.data.corpus import Corpus, write_dataset
from paddlenlp_galvatron.training.data.tokenizer import end_of_text, train_tokenizer
from paddlenlp_galvatron.training.events import Events, Reporters
from paddlenlp_galvatron.training.inputs import open_data, open_validation
from paddlenlp_galvatron.training.loop import TrainingLoop, batches_of
from paddlenlp_galvatron.training.prepare import GROUPS, prepare
from paddlenlp_galvatron.training.run import RankRun
from paddlenlp_galvatron.training.settings import TrainSettings
from paddlenlp_galvatron.training.step_log import read_log

KNOWN = {name for group in GROUPS for name in group.model_fields}
STEPS = 6
BASE = {"model_size": "model.json", "pp_deg": 1, "global_train_batch_size": 4, "seq_length": 8, "input_dir": "random"}
BASE |= {"max_steps": STEPS, "save_strategy": "no", "report_to": "none"}
TEXT, EVAL = {"input_dir": "data/text"}, {"do_eval": 1, "eval_steps": 3, "max_evaluate_steps": 1}
SFT = {"task": "sft", "model_size": "talker", "dataset_name_or_path": "talk", "continue_training": 0, "input_dir": None}
LORA, DPO = {**SFT, "task": "lora"}, {**SFT, "task": "dpo", "dataset_name_or_path": "pairs"}
SPARSE = {"model_type": "glm4_moe", "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
SPARSE |= {"n_shared_experts": 1, "num_key_value_heads": 2, "num_nextn_predict_layers": 1, "first_k_dense_replace": 1}
MTP = {"model_size": "mtp.json"}
LORA_SGD = {**LORA, "optim": "sgd", "learning_rate": 1.0}


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory) -> Iterator[None]:
    """A model, tokenised text, and a model with a tokenizer and conversations."""
    with chdir(tmp_path_factory.mktemp("train")):
        Path("model.json").write_text(json.dumps(MODEL | {"vocab_size": 320, "max_position_embeddings": 32}))
        Path("mtp.json").write_text(json.dumps(json.loads(Path("model.json").read_text()) | SPARSE))
        for number in range(12):
            Path(f"{number}.txt").write_text(f"{number} cats sat on {number * number} mats and saw dogs run " * 6)
        text = Corpus(tuple(sorted(Path().glob("*.txt"))))
        tokenizer = train_tokenizer((document.text for document in text), 300)
        write_dataset(text, Path("data/text"), tokenizer, end_of_text(tokenizer).token)
        for name in ("talker", "other", "talk", "pairs"):
            Path(name).mkdir()
        Path("talker/config.json").write_text(Path("model.json").read_text())
        train_tokenizer(["cats and dogs"], 257).save("talker/tokenizer.json")
        train_tokenizer(["cats sat on mats" * 9] * 9, 290).save("other/tokenizer.json")
        Path("chat.jinja").write_text("{% for m in messages %}{{ m.content }};{% endfor %}")
        for name in ("train", "dev"):
            pairs = [
                {"src": "cats", "response": ["sat", "on mats"[: 1 + n % 7]], "sort": [n % 2, 2]} for n in range(16)
            ]
            lines = [{"src": "cats"[: 2 + n % 3], "tgt": "sat"[: 1 + n % 2]} for n in range(16)]
            Path(f"pairs/{name}.json").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
            Path(f"talk/{name}.json").write_text("".join(json.dumps(line) + "\n" for line in lines))
        yield


def rates(settings: TrainSettings) -> Any:
    recipe = settings.over(STEPS)
    return [recipe.rate_at(step) for step in range(STEPS + 2)]


def updated(settings: TrainSettings) -> Any:
    """The optimizer's class, and weights after three steps."""
    weight = paddle.create_parameter([2], "float32", default_initializer=paddle.nn.initializer.Constant(0.5))
    optimizer = settings.over(STEPS).model_copy(update={"warmup_steps": 0}).build([weight], [weight.name])
    for scale in (1.0, 3.0, 1e-6):
        (weight * paddle.to_tensor([scale, -scale])).sum().backward()
        optimizer.step()
        optimizer.clear_grad()
    return type(optimizer).__name__, weight.numpy().tolist()


def batch(settings: TrainSettings) -> Any:
    """The first global batch."""
    parts = samples_of(open_data(settings, *settings.load_plan()).batch(0))
    return [None if part is None else part.tolist() for part in parts]


def steps(settings: TrainSettings) -> Any:
    return settings.steps_over(open_data(settings, *settings.load_plan()).samples, 4)


def evaluation_steps(settings: TrainSettings) -> Any:
    [(_, source)] = open_validation(settings, *settings.load_plan())
    return batches_of(source, settings.max_evaluate_steps, 4)


def steps_left_out(settings: TrainSettings) -> Any:
    """How many steps without a finite gradient are left out before the run ends."""
    guard = settings.nonfinite_guard(scaled=False)
    for step in range(50):
        try:
            guard.count(step, 1.0, float("nan"))
        except GalvatronError:
            return step
    return 50


def report(settings: TrainSettings) -> Any:
    reporters = Reporters(settings)
    return reporters.names, "runs" in reporters.folder.parts


def adapters(settings: TrainSettings) -> Any:
    return settings.adapters("")


def assumed(settings: TrainSettings) -> Any:
    return settings.load_plan()[0].assumed


def best_metric(settings: TrainSettings) -> Any:
    return settings.best_metric, settings.greater_is_better


def trained(settings: TrainSettings) -> Any:
    """Losses, events and checkpoints of a run in this process."""
    events: list[str] = []

    class Noted(Events):
        def on_log(self, logs: dict[str, float]) -> None:
            super().on_log(logs)
            events.append(f"log {self._step}")

        def on_evaluate(self, metrics: dict[str, float]) -> None:
            super().on_evaluate(metrics)
            events.append(f"evaluate {self._step}")

        def on_save(self, best: float | None) -> None:
            super().on_save(best)
            events.append(f"save {self._step}")

    with redirect_stderr(StringIO()):
        run = RankRun.of(settings)
        for _ in TrainingLoop(run, Noted(run.settings)).steps():
            pass
    losses = [record["loss"] for record in read_log(settings.log)]
    return losses, events, sorted(path.name for path in settings.checkpoints.glob("step-*"))


ROWS = [
    ("learning_rate", 0.1, rates, {}), ("lr_scheduler_type", "cosine", rates, {}),
    ("min_learning_rate", 2e-5, rates, {}), ("warmup_steps", 3, rates, {}), ("warmup_ratio", 0.5, rates, {}),
    ("lr_warmup_fraction", 0.5, rates, {}), ("decay_steps", 3, rates, {}), ("optim", "sgd", updated, {}),
    ("weight_decay", 0.5, updated, {"learning_rate": 0.1}), ("adam_beta1", 0.1, updated, {}),
    ("adam_beta2", 0.1, updated, {}), ("adam_epsilon", 0.1, updated, {}), ("use_multi_tensor", 1, updated, {}),
    ("split", "50,50,0", batch, TEXT), ("seed", 7, batch, {}), ("max_steps", 3, steps, TEXT),
    ("num_train_epochs", 3, steps, {**TEXT, "max_steps": None}), ("max_evaluate_steps", 2, evaluation_steps, TEXT),
    ("on_nonfinite", "skip", steps_left_out, {}), ("max_skipped", 3, steps_left_out, {"on_nonfinite": "skip"}),
    ("report_to", "tensorboard", report, {}), ("logging_dir", "mine", report, {}),
    ("load_best_model_at_end", 1, best_metric, EVAL),
    ("metric_for_best_model", "ppl", best_metric, {**EVAL, "load_best_model_at_end": 1}),
    ("greater_is_better", 1, best_metric, {**EVAL, "load_best_model_at_end": 1}),
    ("initializer_range", 0.5, trained, {}), ("mtp_loss_scaling_factor", 0.1, trained, MTP),
    ("num_nextn_predict_layers", 0, trained, MTP),
    ("max_grad_norm", 1e-3, trained, {"optim": "sgd", "learning_rate": 1.0}), ("logging_steps", 3, trained, {}),
    ("logging_first_step", 1, trained, {"logging_steps": 3}), ("eval_steps", 2, trained, EVAL),
    ("save_total_limit", 1, trained, {"save_strategy": "steps", "save_steps": 2}),
    ("tokenizer_name_or_path", "other", batch, SFT), ("src_length", 2, batch, SFT),
    ("chat_template", "chat.jinja", batch, SFT), ("autoregressive", 1, batch, SFT), ("packing", "best_fit", batch, SFT),
    ("zero_padding", 1, batch, SFT), ("offload_optimizer", 1, assumed, {}), ("lora_rank", 2, adapters, LORA),
    ("lora_alpha", 5, adapters, LORA), ("rslora", 1, adapters, LORA), ("rslora_plus", 1, adapters, LORA),
    ("lora_plus_scale", 4, trained, LORA_SGD), ("max_prompt_len", 1, batch, DPO), ("loss_type", "ipo", trained, DPO),
    ("beta", 0.3, trained, DPO), ("label_smoothing", 0.2, trained, DPO), ("pref_loss_ratio", 2, trained, DPO),
    ("sft_loss_ratio", 1, trained, DPO), ("simpo_gamma", 2, trained, {**DPO, "loss_type": "simpo"}),
    ("dpop_lambda", 3, trained, {**DPO, "loss_type": "dpop", "learning_rate": 0.1}),
    ("reference_free", 1, trained, DPO),
]  # fmt: skip


@pytest.fixture(scope="module")
def shown(tmp_path_factory) -> Any:
    """A view of a run with these options."""

    def look(view: Any, values: dict[str, Any]) -> Any:
        stated = {name: value for name, value in (BASE | values).items() if value is not None}
        stated["output_dir"] = tmp_path_factory.mktemp("run")
        return view(prepare(canonical_options(stated, KNOWN), 1).settings)

    kept = cache(lambda view, values: look(view, dict(values)))
    return lambda view, values, again=False: look(view, values) if again else kept(view, tuple(values.items()))


@pytest.mark.parametrize(("name", "value", "view", "context"), [pytest.param(*row, id=row[0]) for row in ROWS])
def test_an_option_of_training_has_an_effect(shown, name, value, view, context):
    assert shown(view, context) != shown(view, context | {name: value})


@pytest.mark.parametrize(
    ("view", "context"), [(updated, {}), (batch, TEXT), (trained, {}), (trained, DPO), (report, {})]
)
def test_without_it_nothing_changes(shown, view, context):
    assert shown(view, context) == shown(view, context, again=True)
