"""The commands with few options: convert, data, parity, plan, fit, what-if and the import of nccl-tests."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from huggingface_models import FOLDER
from safetensors.numpy import save_file

from paddlenlp_galvatron.base.errors import GalvatronError
from paddlenlp_galvatron.check.gpu import run as gpu_check_run
from paddlenlp_galvatron.check.parity import parity
from paddlenlp_galvatron.cli import convert, data, what_if
from paddlenlp_galvatron.cli.main import main
from paddlenlp_galvatron.plan import uniform_plan, write_plan
from paddlenlp_galvatron.training.checkpoint.adapters import stored_factors
from paddlenlp_galvatron.training.checkpoint.huggingface import read_shape

from .model import write_model
from .row import Row, Seen, Values

NCCL_LINE = "{0} {1} float sum -1 {2} 100.00 175.00 0 {2} 100.00 175.00 0\n"  # of nccl-tests: bytes, numbers, us
A_MIB = 2**10  # bytes that commands take for a MiB here
LARGE = 9 * 2**7  # bytes of text, more than that


def prepare(folder: Path) -> None:
    write_model(folder)
    plan = uniform_plan(layers=2, world_size=2, global_train_batch_size=4, global_tp_deg=2, vocab_tp=2)
    write_plan(plan, folder / "plan.json")
    bare = json.loads((folder / "plan.json").read_text())
    for name in ("world_size", "galvatron"):
        bare.pop(name, None)
    (folder / "bare.json").write_text(json.dumps(bare))
    (folder / "what_if.json").write_text(json.dumps({"num_nodes": 3}))
    (folder / "fit.json").write_text(json.dumps({"tokens": 1e7}))
    timed = replace(plan, assumed=replace(plan.assumed, seq_length=16))
    write_plan(timed, folder / "timed.json")
    steps = [{"step": step, "step_time_s": 0.5, "data_s": 0.0, "peak_memory_mib": [9.0, 9.0]} for step in range(9)]
    (folder / "measured.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    (folder / "calibrate.json").write_text(json.dumps({"output": "other.json"}))
    (folder / "uniform.json").write_text(json.dumps({"chunks": 1}))
    shutil.copytree(FOLDER / "llama", folder / "llama")
    shutil.copytree(FOLDER / "llama", folder / "like")
    (folder / "like" / "tokenizer.json").write_text("{}")
    main(["convert", "h2g", str(folder / "llama"), str(folder / "converted")])
    (folder / "adapters").mkdir()
    factors = stored_factors(read_shape(folder / "llama"), 2)
    zeros = {one.peft: np.zeros(one.shape[::-1], np.float32) for one in factors}
    save_file(zeros, folder / "adapters" / "adapter_model.safetensors")
    (folder / "adapters" / "adapter_config.json").write_text(json.dumps({"r": 2, "lora_alpha": 4}))
    (folder / "texts").mkdir()
    for number in range(12):
        line = {"text": f"{number} cats sat on {number * number} mats " * 6, "body": "dogs run by the sea " * 9}
        (folder / "texts" / f"{number}.jsonl").write_text(json.dumps(line) + "\n")
    words = [
        "data",
        "prepare",
        str(folder / "texts"),
        "--vocab_size",
        "300",
        "--output",
        str(folder / "known" / "text"),
    ]
    assert main(words) == 0
    (folder / "gbk.txt").write_text("猫在垫子上", encoding="gbk")
    (folder / "large").mkdir()
    (folder / "large" / "a.txt").write_text("cats sat " * (LARGE // 9))
    (folder / "large" / "b.txt").write_text("on mats")
    ranks = "".join(f"#  Rank {rank} Group 0 Pid 1 on node-a device {rank} [0x07] NVIDIA A100\n" for rank in range(8))
    times = "".join(NCCL_LINE.format(2**power, 2**power // 4, 2**power / 1e5) for power in range(20, 31, 2))
    (folder / "nccl.log").write_text(f"# Collective test starting: all_reduce_perf\n{ranks}{times}")


class Ended(GalvatronError):
    """Where a quick start would begin to train."""


class SmallSeen(Seen):
    @classmethod
    @contextmanager
    def watched(cls) -> Iterator[dict[str, Any]]:
        calls: dict[str, Any] = {}

        def compared(cases: Any, timeout_s: float, device: str) -> list[parity.Parity]:
            (case,) = cases
            calls["device"] = device
            calls["case"] = asdict(case) | {"batch": str(parity.batch_of(case, 0)), "timeout_s": timeout_s}
            return [parity.Parity(0, 0, "", [], [], [1], 0.0)]

        def served(form: dict[str, str], port: int, show: bool, as_json: bool) -> None:
            plan = what_if.work(what_if.Form.from_values(form)).plan
            calls["served"] = {"form": form, "port": port, "show": show, "json": as_json, "plan": plan}

        def tried(parts: list[str], ranks: int, device: str, folder: Path, seconds: float) -> Iterator[Any]:
            calls["tried"] = {"parts": parts, "ranks": ranks, "folder": folder.name, "seconds": seconds}
            return iter(())

        with (
            patch.object(what_if, "serve", served),
            patch.object(gpu_check_run, "check", tried),
            patch.object(parity, "check_parity", compared),
            patch.object(convert, "MIB", A_MIB),
            patch.object(data, "MIB", A_MIB),
        ):
            yield calls

    @property
    def plan(self) -> Any:
        return self.json.get("out.json")

    @property
    def dtype(self) -> str:
        return json.loads((self.folder / "back" / "config.json").read_text())["torch_dtype"]

    @property
    def lines(self) -> int:
        return len(self.out.splitlines())

    @property
    def words(self) -> str:
        """The output without numbers, which change."""
        return re.sub(r"\d+", "", self.out)

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of every written file, in bytes."""
        return {name: (self.folder / name).stat().st_size for name in self.files}


KNOWN = {"tokenizer": "known"}
FAMILY = Row("qwen2", "refusal")
OF_FILE = {
    "world_size": Row(4, "out", {"FILE": "bare.json"}),
    "model_size": Row("llama2-7b", "refusal"),
}
GROUPS = {"world_size": 4, "global_tp_deg": 2}
MIXTURE = {"MODEL": "qwen3-30b-a3b", "gpus": 8, "seq_length": 4096, "global_train_batch_size": 32}
UNIFORM = {
    "config": Row("uniform.json", "plan.chunks"),
    "output": Row("out.json", "files"),
    "model_size": Row("model.json", "files"),
    "world_size": Row(2, "files"),
    "json": Row(1, "out"),
    "sequence_parallel": Row(0, "plan.galvatron"),
    "mixed_precision": Row("fp32", "plan.galvatron"),
    "seq_length": Row(8, "plan.galvatron"),
    "pp_deg": Row(2, "plan.pp_deg"),
    "global_tp_deg": Row(2, "plan.tp_sizes_enc"),
    "global_tp_consec": Row(0, "plan.tp_consecutive_flags", GROUPS),
    "sdp": Row(1, "plan.dp_types_enc"),
    "default_dp_type": Row("zero2", "plan.default_dp_type"),
    "global_train_batch_size": Row(8, "plan.global_bsz"),
    "chunks": Row(1, "plan.chunks"),
    "global_checkpoint": Row(1, "plan.checkpoint"),
    "pipeline_type": Row("gpipe", "plan.pipeline_type"),
    "vocab_tp": Row(2, "plan.vtp"),
    "embed_sdp": Row(1, "plan.embed_sdp"),
    "use_ulysses": Row(1, "plan.use_sp", {"global_tp_deg": 2}),
    "global_ep_deg": Row(2, "refusal"),  # the model has no experts
    "global_tp_of_ep_deg": Row(2, "refusal"),
    "global_cp_deg": Row(2, "plan.cp_sizes_enc"),
    "global_sharding_deg": Row(2, "plan.sharding_sizes_enc", {"sdp": 1, "world_size": 4}),
    "virtual_pp_deg": Row(2, "refusal", {"pp_deg": 2}),  # the model has two layers
    "expert_parallel_degree": Row(2, "refusal"),
    "tensor_parallel_degree": Row(2, "plan.tp_sizes_enc"),
    "sep_parallel_degree": Row(2, "plan.use_sp"),
    "pipeline_parallel_degree": Row(2, "plan.pp_deg"),
    "data_parallel_degree": Row(3, "refusal"),
    "sharding": Row("stage3", "plan.dp_types_enc"),
    "sharding_parallel_degree": Row(1, "plan.dp_types_enc", {"sharding": "stage3"}),
    "per_device_train_batch_size": Row(5, "refusal"),  # the batch is given, too
    "gradient_accumulation_steps": Row(1, "plan.chunks"),
    "recompute": Row(1, "plan.checkpoint"),
    "recompute_granularity": Row("full", "plan.checkpoint"),
}
PRICED = {"model_size": "model.json", "device": "h100"}
TABLES = {
    "plan show": OF_FILE | {"model_size": Row("llama2-7b", "out"), "json": Row(1, "out")},
    "plan check": OF_FILE | {"log": Row("missing", "refusal"), "json": Row(1, "out")},
    "plan scale": {
        "gpus": Row(8, "out"),
        "global_train_batch_size": Row(16, "out"),
        "model_size": Row("llama2-7b", "refusal", idle="a plan made by hand is scaled without prices"),
        "profiles": Row("texts", "refusal", idle="a plan made by hand is scaled without prices"),
        "device": Row("h100", "out", {"model_size": "model.json"}),
        "memory_constraint": Row(0.001, "code", PRICED),
        "num_gpus_per_node": Row(3, "out", PRICED),
        "task": Row("lora", "out", PRICED),
        "lora_rank": Row(4, "out", {**PRICED, "task": "dpo"}),
        "output": Row("more.json", "files"),
        "json": Row(1, "out"),
    },
    "plan uniform": UNIFORM,
    "plan diff": {
        "profiles": Row("texts", "refusal"),
        "device": Row("h100", "out", {"model_size": "model.json"}),
        "model_size": Row("model.json", "refusal"),
        "memory_constraint": Row(2, "refusal"),
        "num_gpus_per_node": Row(2, "refusal"),
        "task": Row("lora", "refusal"),
        "lora_rank": Row(4, "refusal"),
        "json": Row(1, "out"),
    },
    "plan to-paddlenlp": OF_FILE | {"json": Row(1, "out")},
    "plan to-paddleformers": OF_FILE | {"json": Row(1, "out")},
    "plan to-paddlefleet": OF_FILE | {"json": Row(1, "out")},
    "convert h2g": {"family": FAMILY, "json": Row(1, "words")},
    "convert g2h": {
        "family": FAMILY,
        "load_iteration": Row(3, "refusal"),
        "dtype": Row("fp16", "dtype"),
        "max_shard_mib": Row(1, "files"),
        "like": Row("like", "files"),
        "json": Row(1, "words"),
    },
    "convert merge": {"max_shard_mib": Row(1, "files"), "json": Row(1, "words")},
    "data prepare": {
        "output": Row("made/text", "files"),
        "input": Row("texts", "out", {"PATH": None}),
        "standard_library": Row(1, "files", {"PATH": None, **KNOWN, "limit_mib": 1}),
        "tokenizer": Row("known", "files"),
        "vocab_size": Row(280, "sizes"),
        "end_token": Row("<none>", "refusal"),
        "text_key": Row("body", "sizes"),
        "encoding": Row("gbk", "out", {"PATH": "gbk.txt", **KNOWN}),
        "limit_mib": Row(1, "sizes", {"PATH": "large", **KNOWN}),
        "json": Row(1, "words"),
    },
    "parity": {
        "model_size": Row("qwen2", "calls.case.shape"),
        "nproc": Row(2, "calls.case.plan", {"PLAN": "bare.json"}),
        "optim": Row("adamw", "calls.case.optimizer"),
        "steps": Row(2, "calls.case.steps"),
        "sequence_parallel": Row(1, "calls.case.plan", {"PLAN": "bare.json"}),
        "mixed_precision": Row("bf16", "calls.case.plan", {"PLAN": "bare.json"}),
        "seed": Row(7, "calls.case.batch"),
        "timeout": Row(9, "calls.case.timeout_s"),
        "device": Row("gpu", "calls.device"),
        "packed": Row(1, "calls.case.packed"),
        "lora_rank": Row(2, "calls.case.lora_rank"),
        "loss": Row("ipo", "calls.case.loss"),
        "json": Row(1, "lines"),
    },
    "gpu-check": {
        "nproc": Row(4, "calls.tried"),
        "parts": Row("resume,memory", "calls.tried"),
        "minutes": Row(3, "calls.tried"),
        "output": Row("mine", "files"),
        "json": Row(1, "lines"),
    },
    "calibrate": {
        "config": Row("calibrate.json", "files"),
        "runs": Row("missing", "refusal"),
        "plans": Row("plan.json", "refusal"),
        "device": Row("h800", "out"),
        "model_size": Row("llama2-7b", "refusal"),
        "output": Row("mine.json", "files"),
        "json": Row(1, "out"),
    },
    "fit": {
        "config": Row("fit.json", "out"),
        "model_size": Row("llama2-7b", "refusal"),
        "task": Row("dpo", "out"),
        "lora_rank": Row(4, "out", {"task": "lora"}),
        "document_tokens": Row(
            64, "out", {"MODEL": "llama3.2-1b", "gpus": 8, "seq_length": 8192, "global_train_batch_size": 8}
        ),
        "dataset_name_or_path": Row("texts", "refusal"),  # the model is no folder
        "packing": Row("greedy", "out", idle="of dataset_name_or_path, which is not given"),
        "offload_optimizer": Row(1, "out"),
        "moe_imbalance": Row(4, "out", MIXTURE),
        "moe_imbalance_bound": Row(4, "out", MIXTURE),
        "experts_one_by_one": Row(1, "out", MIXTURE),
        "gpus": Row("1,2", "out"),
        "list": Row(1, "out"),
        "device": Row("a100", "out"),
        "memory_constraint": Row(1, "out"),
        "profiles": Row("missing", "refusal"),
        "seq_length": Row(8, "out"),
        "global_train_batch_size": Row(8, "out"),
        "max_cp_deg": Row(
            2, "out", {"MODEL": "llama3.2-1b", "gpus": 64, "seq_length": 8192, "global_train_batch_size": 1}
        ),
        "tokens": Row(1e6, "out"),
        "num_train_epochs": Row(2, "out"),
        "price_per_gpu_hour": Row(2, "out"),
        "save_gb_per_s": Row(5, "out"),
        "json": Row(1, "out"),
    },
    "what-if": {
        "config": Row("what_if.json", "calls.served.form"),
        "model_size": Row("llama2-7b", "refusal"),
        "seq_length": Row(8, "calls.served.plan"),
        "global_train_batch_size": Row(32, "calls.served.plan"),
        "device": Row("a100", "calls.served.plan"),
        "profiles": Row("texts", "refusal"),
        "num_nodes": Row(2, "calls.served.plan"),
        "num_gpus_per_node": Row(4, "calls.served.plan"),
        "memory_constraint": Row(20, "calls.served.plan"),
        "search_options": Row("--settle_chunk 2", "calls.served.plan"),
        "port": Row(8123, "calls.served.port"),
        "no_browser": Row(1, "calls.served.show"),
        "json": Row(1, "calls.served.json"),
    },
    "doctor": {
        "output_dir": Row("mine", "words"),
        "profiles": Row("texts", "words"),
        "plan": Row("plan.json", "words"),
        "hostfile": Row("plan.json", "words"),
        "json": Row(1, "words"),
    },
    "profile import-nccl-tests": {
        "num_nodes": Row(2, "files"),
        "num_gpus_per_node": Row(4, "files"),
        "output": Row("mine", "files"),
        "json": Row(1, "out"),
    },
}
PREPARED: Values = {"PATH": "texts", "output": "data/text", "vocab_size": 300}
FILE: Values = {"FILE": "plan.json"}
BASES: dict[str, Values] = {command: FILE for command in TABLES if command.startswith("plan ")} | {
    "plan diff": {"FIRST": "plan.json", "SECOND": "bare.json"},
    "plan scale": {"FILE": "plan.json", "gpus": 4},
    "plan uniform": {"output": "out.json", "model_size": "model.json", "world_size": 2, "global_train_batch_size": 4},
    "convert h2g": {"INPUT": "llama", "OUTPUT": "back"},
    "convert g2h": {"INPUT": "converted", "OUTPUT": "back"},
    "convert merge": {"BASE": "llama", "ADAPTERS": "adapters", "OUTPUT": "back"},
    "data prepare": PREPARED,
    "parity": {"PLAN": "plan.json"},
    "gpu-check": {},
    "fit": {"MODEL": "model.json", "gpus": 1, "seq_length": 16},
    "calibrate": {"RUNS": "measured.jsonl", "plans": "timed.json", "device": "a100", "model_size": "model.json"},
    "what-if": {"MODEL": "model.json", "seq_length": 16},
    "doctor": {},
    "profile import-nccl-tests": {"LOG": "nccl.log"},
}
SEEN = SmallSeen
