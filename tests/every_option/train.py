"""`galvatron train`, up to where its ranks would start: by their arguments, and the objects that they build."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from functools import cached_property
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import paddle
from huggingface_models import FOLDER

from paddlenlp_galvatron.base.errors import GalvatronError, UserError
from paddlenlp_galvatron.cli.training_run import TrainingRun
from paddlenlp_galvatron.launch import watch
from paddlenlp_galvatron.plan import ModelShape, Plan, uniform_plan, write_plan
from paddlenlp_galvatron.plan.strategy import Assumptions
from paddlenlp_galvatron.runtime.batch import samples_of
from paddlenlp_galvatron.training.data.corpus import Corpus, write_dataset
from paddlenlp_galvatron.training.data.special_tokens import end_of_text
from paddlenlp_galvatron.training.data.tokenizer import train_tokenizer
from paddlenlp_galvatron.training.evaluation import batches_of
from paddlenlp_galvatron.training.events import Events
from paddlenlp_galvatron.training.inputs import open_data, open_validation
from paddlenlp_galvatron.training.loop import TrainingLoop
from paddlenlp_galvatron.training.reporters import Reporters
from paddlenlp_galvatron.training.run import Run
from paddlenlp_galvatron.training.settings import TrainSettings

from .model import rows, write_model
from .row import Row, Seen

STEPS = 6
LAYERS = 2


def prepare(folder: Path) -> None:
    write_model(folder)
    (folder / "options.json").write_text(json.dumps({"seed": 7}))
    for name, chunks in (("plan", 1), ("configs/other", 2)):
        (folder / name).parent.mkdir(exist_ok=True)
        plan = uniform_plan(
            layers=LAYERS, world_size=2, global_train_batch_size=4, chunks=chunks, assumed=Assumptions(seq_length=8)
        )
        write_plan(plan, folder / f"{name}.json")
    for number in range(12):
        (folder / f"{number}.txt").write_text(f"{number} cats sat on {number * number} mats and saw dogs run " * 6)
    prepare_tuning(folder)
    text = Corpus(tuple(sorted(folder.glob("*.txt"))))
    tokenizer = train_tokenizer((document.text for document in text), 300)
    write_dataset(text, folder / "data" / "text", tokenizer, end_of_text(tokenizer).token)


def prepare_tuning(folder: Path) -> None:
    """A model with a tokenizer, another tokenizer, a template, and conversations."""
    for name in ("talker", "other", "talk"):
        (folder / name).mkdir()
    (folder / "talker" / "config.json").write_text((folder / "model.json").read_text())
    train_tokenizer(["cats and dogs"], 257).save(str(folder / "talker" / "tokenizer.json"))
    train_tokenizer(["cats sat on mats" * 9] * 9, 290).save(str(folder / "other" / "tokenizer.json"))
    (folder / "chat.jinja").write_text("{% for m in messages %}{{ m.content }};{% endfor %}")
    (folder / "pairs").mkdir()
    for name in ("train", "dev"):
        pairs = [{"src": "cats", "response": ["sat", "on mats"[: 1 + n % 7]], "sort": [n % 2, 2]} for n in range(16)]
        (folder / "pairs" / f"{name}.json").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
        lines = [{"src": "cats"[: 2 + number % 3], "tgt": "sat"[: 1 + number % 2]} for number in range(16)]
        (folder / "talk" / f"{name}.json").write_text("".join(json.dumps(line) + "\n" for line in lines))


class Announced(Events):
    """The names of announced events, and after which step."""

    def __init__(self, settings: TrainSettings) -> None:
        super().__init__(settings)
        self.events: list[str] = []

    def on_log(self, logs: dict[str, float]) -> None:
        super().on_log(logs)
        self.events.append(f"log {self._step}")

    def on_evaluate(self, metrics: dict[str, float]) -> None:
        super().on_evaluate(metrics)
        self.events.append(f"evaluate {self._step}")

    def on_save(self, best: float | None) -> None:
        super().on_save(best)
        self.events.append(f"save {self._step}")


class TrainSeen(Seen):
    @classmethod
    @contextmanager
    def watched(cls) -> Iterator[dict[str, Any]]:
        calls: dict[str, Any] = {}

        def start(run: TrainingRun, program: Any, timeout_s: float, nodes: Any, wait_s: float) -> None:
            calls["settings"], calls["timeout_s"], calls["nodes"] = run._settings, timeout_s, nodes
            calls["wait_s"] = wait_s
            calls["peak"] = run._health._mfu(1.0)

        unstarted = patch.multiple(TrainingRun, start=start, show_end=lambda run: None)
        with unstarted, patch.object(watch, "await_first", lambda *_: None):
            yield calls

    @property
    def settings(self) -> TrainSettings | None:
        return self.calls.get("settings")

    @cached_property
    def loaded(self) -> tuple[Plan, ModelShape] | None:
        return self.settings.load_plan() if self.settings else None

    @property
    def plan(self) -> Plan | None:
        return self.loaded[0] if self.loaded else None

    @property
    def shapes(self) -> dict[str, ModelShape] | None:
        return {"0": self.loaded[1]} if self.loaded else None

    @property
    def recipe(self) -> TrainSettings:
        assert self.settings is not None
        return self.settings.over(STEPS)

    @property
    def rates(self) -> list[float]:
        """The learning rate of every step, and of two more."""
        recipe = self.recipe
        return [recipe.rate_at(step) for step in range(STEPS + 2)]

    @property
    def optimizer(self) -> dict[str, Any]:
        """Its class, and what it makes of a gradient in three steps."""
        weight = paddle.create_parameter([2], "float32", default_initializer=paddle.nn.initializer.Constant(0.5))
        optimizer = self.recipe.model_copy(update={"warmup_steps": 0}).build([weight], [weight.name])
        for scale in (1.0, 3.0, 1e-6):
            (weight * paddle.to_tensor([scale, -scale])).sum().backward()
            optimizer.step()
            optimizer.clear_grad()
        return {"class": type(optimizer).__name__, "weights": weight.numpy().tolist()}

    @property
    def table(self) -> str:
        """The lines of a dry run about each stage."""
        return self.out.partition("per rank")[2]

    @property
    def logs_in(self) -> str:
        """The folder of VisualDL's logs."""
        assert self.settings is not None
        return Reporters(self.settings).folder.absolute().relative_to(self.folder).parts[0]

    @property
    def reporters(self) -> str:
        """Where a run reports to, or why it cannot."""
        assert self.settings is not None
        try:
            return str(Reporters(self.settings).names)
        except UserError as error:
            return str(error)

    @property
    def batch(self) -> Any:
        """The first global batch."""
        assert self.settings is not None and self.loaded
        parts = samples_of(open_data(self.settings, *self.loaded).batch(0))
        return [None if part is None else part.tolist() for part in parts]

    @property
    def adapters(self) -> Any:
        """LoRA's, of the run."""
        assert self.settings is not None
        return self.settings.adapters("")

    @property
    def steps(self) -> int:
        assert self.settings is not None and self.loaded
        return self.settings.steps_over(open_data(self.settings, *self.loaded).samples, 4)[0]

    @property
    def evaluation_steps(self) -> int:
        assert self.settings is not None and self.loaded
        [(_, source)] = open_validation(self.settings, *self.loaded)
        return batches_of(source, self.settings.max_evaluate_steps, 4)

    @property
    def steps_left_out(self) -> int:
        """How many steps without a finite gradient are left out before the run ends."""
        assert self.settings is not None
        skips = self.settings.nonfinite_guard(scaled=False)
        for step in range(50):
            try:
                skips.count(step, 1.0, float("nan"))
            except GalvatronError:
                return step
        return 50

    @cached_property
    def trained(self) -> dict[str, Any] | None:
        """The run in this process: losses, events, and the checkpoints that are left."""
        if self.settings is None:
            return None
        with redirect_stderr(StringIO()):
            run = Run.of(self.settings)
            announced = Announced(run.settings)
            for _ in TrainingLoop(run, announced).steps():
                pass
        losses = [json.loads(line)["loss"] for line in self.settings.log.read_text().splitlines()]
        checkpoints = sorted(path.name for path in self.settings.checkpoints.glob("step-*"))
        return {"losses": losses, "events": announced.events, "checkpoints": checkpoints}


BASE = {"model_size": "model.json", "nproc": 1, "pp_deg": 1, "global_train_batch_size": 4, "seq_length": 8}
BASE |= {"max_steps": STEPS, "save_strategy": "no", "report_to": "none", "input_dir": "random"}
FOUR = {"nproc": 4}
FILE = {"pp_deg": None, "global_train_batch_size": None, "nproc": 2}
NODES = {"nproc": 2, "num_nodes": 2, "node_rank": 1, "master_addr": "127.0.0.2", "master_port": 2900}
STOCK = {"nproc": 4, "pp_deg": None, "global_train_batch_size": None, "per_device_train_batch_size": 1}
STOCK |= {"pipeline_parallel_degree": 2}
DATA = {"input_dir": "data/text"}
HF = {"model_size": None, "load": str(FOLDER / "llama")}
COMMAND = {
    "config": Row("options.json", "settings.seed"),
    "dry_run": Row(1, "out"),
    "galvatron_config_path": Row("plan.json", "plan.micro_batches", FILE),
    **rows("shapes", "plan.assumed.seq_length"),
    "hidden_size_list": Row("128", "refusal"),
}
LAUNCH = {
    "nproc": Row(2, "plan.world_size"),
    "num_gpus_per_node": Row(2, "plan.world_size", {"nproc": None}),
    "num_nodes": Row(2, "calls.nodes", NODES),
    "node_rank": Row(1, "calls.nodes", NODES),
    "master_addr": Row("127.0.0.2", "calls.nodes", NODES),
    "master_port": Row(2900, "calls.nodes", NODES),
    "timeout": Row(60, "calls.timeout_s"),
    "distributed_timeout_minutes": Row(2, "calls.wait_s"),
}
STRATEGY = {
    "pp_deg": Row(2, "plan.stages", FOUR),
    "global_tp_deg": Row(2, "plan.layers", FOUR),
    "global_tp_consec": Row(0, "plan.layers", {**FOUR, "global_tp_deg": 2}),
    "sdp": Row(1, "plan.layers", FOUR),
    "default_dp_type": Row("zero2", "plan.layers", FOUR),
    "global_train_batch_size": Row(8, "plan.global_batch"),
    "chunks": Row(2, "plan.micro_batches"),
    "global_checkpoint": Row(1, "plan.layers"),
    "pipeline_type": Row("gpipe", "plan.schedule", {**FOUR, "pp_deg": 2}),
    "vocab_tp": Row(2, "plan.vocab", FOUR),
    "embed_sdp": Row(1, "plan.vocab", FOUR),
    "use_ulysses": Row(1, "plan.layers", {**FOUR, "global_tp_deg": 2}),
    "global_ep_deg": Row(2, "refusal", FOUR),  # the model has no experts
    "global_tp_of_ep_deg": Row(2, "refusal", FOUR),
    "expert_parallel_degree": Row(2, "refusal", FOUR),
    "global_cp_deg": Row(2, "plan.layers", FOUR),
    "global_sharding_deg": Row(2, "plan.layers", {**FOUR, "sdp": 1}),
    "virtual_pp_deg": Row(2, "plan.stages", {**FOUR, "pp_deg": 2}),
    "tensor_parallel_degree": Row(2, "plan.layers", FOUR),
    "sep_parallel_degree": Row(2, "plan.layers", FOUR),
    "pipeline_parallel_degree": Row(2, "plan.stages", STOCK),
    "data_parallel_degree": Row(3, "refusal", FOUR),
    "sharding": Row("stage3", "plan.layers", FOUR),
    "sharding_parallel_degree": Row(1, "plan.layers", {**FOUR, "sharding": "stage3"}),
    "per_device_train_batch_size": Row(1, "plan.global_batch", STOCK),
    "gradient_accumulation_steps": Row(2, "plan.micro_batches"),
    "recompute": Row(1, "plan.layers"),
    "recompute_granularity": Row("full", "plan.layers"),
}
RECIPE = {
    "optim": Row("sgd", "optimizer.class"),
    "learning_rate": Row(0.1, "rates"),
    "lr_scheduler_type": Row("cosine", "rates"),
    "min_learning_rate": Row(2e-5, "rates"),
    "warmup_steps": Row(3, "rates"),
    "warmup_ratio": Row(0.5, "rates"),
    "decay_steps": Row(3, "rates"),
    "weight_decay": Row(0.5, "optimizer.weights", {"learning_rate": 0.1}),
    "adam_beta1": Row(0.1, "optimizer.weights"),
    "adam_beta2": Row(0.1, "optimizer.weights"),
    "adam_epsilon": Row(0.1, "optimizer.weights"),
    "use_multi_tensor": Row(1, "optimizer.class"),
    "max_grad_norm": Row(1e-3, "trained.losses", {"optim": "sgd", "learning_rate": 1.0}),
}
RUN = {
    "output_dir": Row("mine", "files"),
    "input_dir": Row("data/text", "refusal"),  # without, there is none
    "split": Row("50,50,0", "batch", DATA),
    "max_steps": Row(3, "steps", DATA),
    "num_train_epochs": Row(3, "steps", {**DATA, "max_steps": None}),
    "sequence_parallel": Row(1, "plan.assumed.sequence_parallel"),
    "no_async_grad_reduce": Row(1, "plan.assumed.async_grad_reduce"),
    "mixed_precision": Row("bf16", "plan.assumed.mixed_precision"),
    "bf16": Row(1, "plan.assumed.mixed_precision"),
    "fp16": Row(1, "plan.assumed.mixed_precision"),
    "amp_master_grad": Row(1, "table", {"bf16": 1, "dry_run": 1}),
    "compute_precision": Row("bf16", "refusal", {"bf16": 1}),
    "use_flash_attention": Row(1, "refusal"),
    "use_fused_rope": Row(1, "plan.assumed.fused_rope"),
    "use_fused_rms_norm": Row(1, "plan.assumed.fused_rms_norm"),
    "use_fused_cross_entropy": Row(1, "plan.assumed.fused_cross_entropy"),
    "load": Row(HF["load"], "trained.losses", {"model_size": HF["load"]}),
    "continue_training": Row(1, "settings.initial_weights", {"model_size": HF["load"]}),
    "load_distributed": Row(1, "settings.continue_from", HF),
    "load_iteration": Row(3, "refusal", HF),
    "initializer_range": Row(0.5, "trained.losses"),
    "router_aux_loss_coef": Row(0.5, "refusal"),  # the model has no experts
    "overwrite_output_dir": Row(1, "settings.continue_from"),
    "device": Row("gpu", "refusal"),
    "resume_from_checkpoint": Row("none", "settings.continue_from"),
    "save_strategy": Row("epoch", "trained.events", {"save_steps": 3}),
    "save_steps": Row(3, "trained.events", {"save_strategy": "steps"}),
    "save_total_limit": Row(1, "trained.checkpoints", {"save_strategy": "steps", "save_steps": 2}),
    "do_eval": Row(1, "trained.events", {"eval_steps": 3, "max_evaluate_steps": 1}),
    "evaluation_strategy": Row("steps", "trained.events", {"eval_steps": 3, "max_evaluate_steps": 1}),
    "eval_steps": Row(3, "trained.events", {"do_eval": 1, "max_evaluate_steps": 1}),
    "max_evaluate_steps": Row(2, "evaluation_steps"),
    "load_best_model_at_end": Row(1, "settings.best_metric", {"do_eval": 1}),
    "metric_for_best_model": Row("ppl", "settings.best_metric", {"do_eval": 1, "load_best_model_at_end": 1}),
    "greater_is_better": Row(1, "settings.greater_is_better", {"do_eval": 1, "load_best_model_at_end": 1}),
    "logging_steps": Row(3, "trained.events"),
    "logging_first_step": Row(1, "trained.events"),
    "peak_tflops": Row(3, "calls.peak"),
    "logging_dir": Row("mine", "logs_in"),
    "report_to": Row("tensorboard", "reporters"),
    "on_nonfinite": Row("skip", "steps_left_out"),
    "max_skipped": Row(3, "steps_left_out", {"on_nonfinite": "skip"}),
    "trace": Row("1-2", "settings.traced_steps"),
    "seed": Row(7, "batch"),
}
TUNE = {"task": "sft", "model_size": "talker", "dataset_name_or_path": "talk", "continue_training": 0}
TUNE["input_dir"] = None
LORA = {**TUNE, "task": "lora"}
DPO = {**TUNE, "task": "dpo", "dataset_name_or_path": "pairs"}
PREFERENCE = {
    "train_dataset_path": Row("pairs/train.json", "refusal", DPO),
    "dev_dataset_path": Row("pairs/dev.json", "settings.dev_dataset_path", DPO),
    "max_prompt_len": Row(1, "batch", DPO),
    "loss_type": Row("ipo", "trained.losses", DPO),
    "beta": Row(0.3, "trained.losses", DPO),
    "label_smoothing": Row(0.2, "trained.losses", DPO),
    "pref_loss_ratio": Row(2, "trained.losses", DPO),
    "sft_loss_ratio": Row(1, "trained.losses", DPO),
    "simpo_gamma": Row(2, "trained.losses", {**DPO, "loss_type": "simpo"}),
    "dpop_lambda": Row(3, "settings.preference", {**DPO, "loss_type": "dpop"}),
    "reference_free": Row(1, "trained.losses", DPO),
}
TUNING = {
    "task": Row("lora", "settings.kind", TUNE),
    "dataset_name_or_path": Row("talk", "settings.dataset_name_or_path", TUNE),
    "tokenizer_name_or_path": Row("other", "batch", TUNE),
    "src_length": Row(2, "batch", TUNE),
    "chat_template": Row("chat.jinja", "batch", TUNE),
    "autoregressive": Row(1, "batch", TUNE),
    "packing": Row("best_fit", "batch", TUNE),
    "zero_padding": Row(1, "batch", TUNE),
    "greedy_zero_padding": Row(1, "settings.effective_packing", {**TUNE, "zero_padding": 1}),
    "lora": Row(1, "settings.kind", TUNE),
    "lora_rank": Row(2, "adapters", LORA),
    "lora_alpha": Row(5, "adapters", LORA),
    "rslora": Row(1, "adapters", LORA),
    "rslora_plus": Row(1, "adapters", LORA),
    "lora_plus_scale": Row(4, "trained.losses", {**LORA, "optim": "sgd", "learning_rate": 1.0}),
    "lora_path": Row("talk", "refusal", LORA),
}
JSON = Row(1, cannot="a run prints it when it ends")
TABLES = {
    "train": {**COMMAND, **LAUNCH, **STRATEGY, **RECIPE, **RUN, **TUNING, **PREFERENCE, "json": JSON},
}
SEEN, BASES = TrainSeen, {"train": BASE}
