"""`galvatron search` on the small example of `cost_examples`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import cached_property
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

from cost_examples import COMPUTATION, HARDWARE, MEMORY, MODEL, SEQ
from planner.test_experts import SMALL

from paddlenlp_galvatron.cli.main import main
from paddlenlp_galvatron.model import config_of
from paddlenlp_galvatron.plan import plan_id, read_plan
from paddlenlp_galvatron.planner import branches, question
from paddlenlp_galvatron.planner.space import PlanFamily, Space
from paddlenlp_galvatron.profiles import Collective, MessageGroup, Shape

from .model import rows, write_model
from .row import Row, Seen, words_of

LENGTHS = (1, 2, 3)  # of other/, in lengths of the example
NOISE = ("search_time_s", "peak_rss_mib", "log")
NARROW = {"max_tp_deg": 2, "max_pp_deg": 2, "disable_vtp": 1}  # explaining a plan searches its space some 20 times


def prepare(folder: Path) -> None:
    """Profiles in configs/; in other/ a quicker network and more memory, in single/ times of one batch size."""
    write_model(folder)
    (folder / "example.json").write_text(json.dumps(config_of(MODEL)))
    (folder / "mixture.json").write_text(json.dumps(config_of(SMALL)))
    (folder / "options.json").write_text(json.dumps({"settle_chunk": 4}))
    (folder / "plan_options.json").write_text(json.dumps({"memory_constraint": 4}))
    for profile in (HARDWARE, COMPUTATION, MEMORY):
        profile.save(folder / "configs")
    faster = {key: 2 * speed for key, speed in HARDWARE.allreduce_mib_per_ms.items()}
    messages = {MessageGroup(Collective.ALL_REDUCE, size): {1.0: 0.01, 1024.0: 1.0} for size in (2, 4, 8)}
    other = replace(HARDWARE, allreduce_mib_per_ms=faster, p2p_mib_per_ms={2: 90, 4: 90, 8: 90}, overlap_coe=2.0)
    replace(other, messages_ms=messages).save(folder / "other")
    points = [(at, more) for at in COMPUTATION.other_ms for more in LENGTHS]
    other_ms = {Shape(at.batch, at.seq * more): more + at.batch / 10 for at, more in points}
    replace(COMPUTATION, layer_ms={0: other_ms}, other_ms=other_ms).save(folder / "other")
    one = {at: ms for at, ms in COMPUTATION.other_ms.items() if at.batch == 8}
    replace(COMPUTATION, layer_ms={0: one}, other_ms=one).save(folder / "single")
    layers = {key: _longer(by[SEQ], "activation_mib") for key, by in MEMORY.layers.items()}
    vocab = {key: _longer(by[SEQ], "activation_mib") for key, by in MEMORY.vocab.items()}
    replace(MEMORY, layers=layers, vocab=vocab).save(folder / "other")

    with chdir(folder):
        for name, gb in (("plan.json", 8), ("tight.json", 0.9)):
            options = BASE | {"memory_constraint": gb, "output_config_path": name, "log_dir": "searched", **NARROW}
            with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
                main(["search", *words_of(options)])
        record = {"step": 0, "plan": plan_id(read_plan("plan.json", 8)), "step_time_s": 0.5, "data_s": 0.0}
        record |= {"loss": 1.0, "lr": 1e-3, "grad_norm": 1.0, "tokens_per_s": 1e3}
        Path("log.jsonl").write_text(json.dumps(record | {"peak_memory_mib": [100.0] * 8}) + "\n")


def _longer(one: Any, name: str) -> dict[int, Any]:
    """Memory at two lengths, three times as much at the first as in the example."""
    mib = {degree: 3 * mib for degree, mib in getattr(one, name).items()}
    return {
        SEQ * more: replace(one, **{name: {degree: more * each for degree, each in mib.items()}}) for more in LENGTHS
    }


class SearchSeen(Seen):
    @classmethod
    @contextmanager
    def watched(cls) -> Iterator[dict[str, Any]]:
        calls: dict[str, Any] = {"strategies": set()}
        load = question.load

        class Noting(Space):
            def layers(self, family: PlanFamily) -> Any:
                found = super().layers(family)
                calls["strategies"] |= set(found)
                return found

        def loading(shapes: Any, nodes: int, gpus: int, assumed: Any, **others: Any) -> Any:
            calls["shapes"], calls["length"] = dict(enumerate_words(shapes)), assumed.seq_length
            return load(shapes, nodes, gpus, assumed, **others)

        with patch.object(question, "load", loading), patch.object(branches, "Space", Noting):
            yield calls

    @cached_property
    def answer(self) -> dict[str, Any] | None:
        """The closing line, without parts that differ from run to run."""
        last = (self.out.splitlines() or [""])[-1]
        if not last.startswith("{"):
            return None
        return {name: value for name, value in json.loads(last).items() if name not in NOISE}

    @cached_property
    def plan(self) -> dict[str, Any] | None:
        return json.loads(Path(self.answer["plan"]).read_text()) if self.answer and self.answer["plan"] else None

    @property
    def page(self) -> str:
        """The report that was written."""
        return (self.folder / "report.html").read_text()

    @property
    def families(self) -> list[str]:
        """Batches, micro-batches, stages and schedules that were tried, of the log."""
        (name,) = (name for name in self.files if Path(name).match("Search_*.log"))
        lines = (self.folder / name).read_text().splitlines()
        return sorted({line.split(":")[0] for line in lines if line.startswith("batch ")})

    @property
    def folders(self) -> list[str]:
        return sorted({name.rpartition("/")[0] for name in self.files})


def enumerate_words(items: Any) -> Iterator[tuple[str, Any]]:
    return ((str(number), item) for number, item in enumerate(items))


BASE = {
    "json": 1,
    "model_size": "example.json",
    "num_nodes": 2,
    "num_gpus_per_node": 4,
    "memory_constraint": 8,
    "settle_bsz": 32,
    "seq_length": 512,
    "default_dp_type": "ddp",
}
MIXTURE = {"model_size": "mixture.json", "device": "h100-80gb", "settle_bsz": 8, "seq_length": 64, **NARROW}
# Experts that must be shared out.
SPREAD = {**MIXTURE, "model_size": "qwen3-30b-a3b", "memory_constraint": 80, "disable_vtp": 0, "disable_sdp": 1}
TIGHT = {"memory_constraint": 0.9}  # GB, in which every strategy counts
OTHER = {"profiles": "other"}
SINGLE = {"time_profiling_path": "single"}
BATCHES = {"settle_bsz": None, "min_bsz": 8, "max_bsz": 32}
ROWS = {
    "config": Row("options.json", "answer.chunks", {"settle_chunk": None}),
    "json": Row(1, "answer"),
    **rows("calls.shapes", "calls.length", model_size="model.json", seq_length=8),
    "model_size": Row("example.json", "answer.model"),
    "num_nodes": Row(2, "answer.plan"),
    "num_gpus_per_node": Row(4, "answer.plan"),
    "world_size": Row(8, "answer", {"num_gpus_per_node": None}),
    "profile_gpu_num": Row(4, "refusal"),
    "device": Row("h100-80gb", "answer.time_s"),
    "memory_constraint": Row(1.4, "answer.stages"),
    "context_mib": Row(7000, "answer.budget_mib"),
    "task": Row("lora", "answer.time_s"),
    "lora_rank": Row(4, "answer.time_s", {"task": "dpo"}),
    "document_tokens": Row(9, "answer.time_s"),
    "dataset_name_or_path": Row("here", "refusal"),  # the model is no folder
    "packing": Row("greedy", "answer.time_s", idle="of dataset_name_or_path, which is not given"),
    "tokens": Row(1e6, "answer.job"),
    "num_train_epochs": Row(2, "answer.job", {"tokens": 1e6}),
    "price_per_gpu_hour": Row(2, "answer.job", {"tokens": 1e6}),
    "save_gb_per_s": Row(5, "answer.job"),
    "offload_optimizer": Row(1, "refusal"),  # its profiles name no GPU
    "moe_imbalance": Row(1.9, "answer.load", SPREAD),
    "moe_imbalance_bound": Row(3, "answer.stages", SPREAD | {"simplest_within": 0}),
    "experts_one_by_one": Row(1, "answer.time_s", MIXTURE),
    "min_bsz": Row(16, "families", BATCHES),
    "max_bsz": Row(16, "families", BATCHES),
    "bsz_scale": Row(12, "families", BATCHES),
    "settle_bsz": Row(16, "answer.global_bsz"),
    "settle_chunk": Row(4, "answer.chunks"),
    "search_space": Row("dp+tp", "plan.pp_deg"),
    "fine_grained_mode": Row(0, "plan.tp_sizes_enc", TIGHT),
    "sp_space": Row("sp", "answer.stages", {"disable_pp": 1}),
    "max_tp_deg": Row(1, "answer.stages", TIGHT),
    "max_sp_deg": Row(2, "refusal"),
    "max_cp_deg": Row(2, "calls.strategies"),
    "max_ep_deg": Row(1, "calls.strategies", MIXTURE),
    "max_etp_deg": Row(2, "calls.strategies", MIXTURE),
    "sharding_sizes": Row("0", "calls.strategies"),
    "max_pp_deg": Row(1, "plan.pp_deg"),
    "max_virtual_pp_deg": Row(2, "families"),
    "disable_dp": Row(1, "answer.stages"),
    "disable_sdp": Row(1, "calls.strategies"),
    "disable_tp": Row(1, "plan.tp_sizes_enc", TIGHT),
    "disable_sp": Row(1, "calls.strategies", {"sp_space": "tp+sp"}),
    "disable_cp": Row(1, "calls.strategies", {"max_cp_deg": 2}),
    "disable_ep": Row(1, "calls.strategies", MIXTURE),
    "disable_etp": Row(1, "calls.strategies", MIXTURE),
    "disable_pp": Row(1, "plan.pp_deg"),
    "disable_ckpt": Row(1, "calls.strategies"),
    "recompute_parts": Row(1, "calls.strategies"),
    "disable_vtp": Row(1, "plan.vtp", TIGHT),
    "embed_sdp": Row(0, "plan.embed_sdp", {"disable_pp": 1, "disable_vtp": 1}),
    "tp_consec": Row(0, "calls.strategies"),
    "pipeline_type": Row("pipedream_flush", "plan.pipeline_type"),
    "default_dp_type": Row("ddp", "plan.default_dp_type"),
    "trainer": Row("paddlenlp", "answer.free_time_s"),
    "sequence_parallel": Row(0, "plan.galvatron.assumed"),
    "mixed_precision": Row("fp32", "refusal"),
    "no_async_grad_reduce": Row(1, "answer.time_s"),
    "amp_master_grad": Row(0, "plan.galvatron.assumed"),
    "use_flash_attention": Row(1, "plan.galvatron.assumed"),
    "no_global_memory_buffer": Row(1, "answer.stages", {"disable_pp": 1, **TIGHT}, idle="the working set is measured"),
    "profiles": Row("other", "answer.time_s"),
    "profile_mode": Row("batch", "answer.feasible", SINGLE),
    "time_profile_mode": Row("batch", "answer.feasible", SINGLE),
    "memory_profile_mode": Row(
        "sequence", "answer.feasible", {**OTHER, "time_profile_mode": "sequence", "seq_length": 768}
    ),
    "profile_dialect": Row("paddlenlp", "refusal"),
    "time_profiling_path": Row("other", "answer.time_s"),
    "memory_profiling_path": Row("other", "answer.stages"),
    "allreduce_bandwidth_config_path": Row("other", "answer.time_s"),
    "p2p_bandwidth_config_path": Row("other", "answer.time_s"),
    "overlap_coe_path": Row("other", "answer.time_s", {"disable_pp": 1}),
    "sp_time_path": Row("other", "answer.notes"),
    "allow_foreign_profiles": Row(1, "answer.feasible", {"vocab_size": 64000}),
    "simplest_within": Row(100, "answer.strategies", TIGHT),
    "top_k": Row(2, "answer.runners_up"),
    "effort": Row(1, "answer.counts", TIGHT),
    "output_config_path": Row("mine/plan.json", "answer.plan"),
    "log_dir": Row("mine", "folders"),
    "save_runners_up": Row(1, "files", {"top_k": 2, "log_dir": "/dev/null"}),
}
EXPLAIN = {
    "config": Row("plan_options.json", "out", {"memory_constraint": None}),
    "plan": Row("tight.json", "answer.time_s", {"PLAN": None}),
    "profiles": Row("other", "answer.time_s"),
    "device": Row("a100", "answer.time_s"),
    "model_size": Row("model.json", "refusal"),
    "memory_constraint": Row(2, "answer.budget_mib"),
    "num_gpus_per_node": Row(2, "refusal"),
    "task": Row("lora", "answer.time_s"),
    "lora_rank": Row(4, "answer.time_s", {"task": "dpo"}),
    "json": Row(1, "answer"),
}
TRACE = {
    "output": Row("mine.json", "files"),
    "profiles": Row("other", "out"),
    "device": Row("a100", "out"),
    "model_size": Row("model.json", "refusal"),
    "memory_constraint": Row(2, "out", idle="a time line has no budget"),
    "num_gpus_per_node": Row(2, "refusal"),
    "task": Row("lora", "out"),
    "lora_rank": Row(4, "out", {"task": "dpo"}),
    "json": Row(1, "out"),
}
REPORT = {
    "config": Row("plan_options.json", "page", {"memory_constraint": None}),
    "plan": Row("tight.json", "files", {"PLAN": None}),
    "json": Row(1, "out"),
    "output": Row("mine.html", "files"),
    "profiles": Row("other", "page"),
    "device": Row("a100", "page"),
    "model_size": Row("model.json", "refusal"),
    "memory_constraint": Row(2, "page"),
    "num_gpus_per_node": Row(2, "refusal"),
    "task": Row("lora", "page"),
    "lora_rank": Row(4, "page", {"task": "dpo"}),
    "log": Row("log.jsonl", "page"),
}
TABLES = {"search": ROWS, "explain": EXPLAIN, "plan trace": TRACE, "report": REPORT}
BASES = {
    "search": BASE,
    "explain": {"PLAN": "plan.json", "json": 1},
    "plan trace": {"FILE": "plan.json", "output": "time.json"},
    "report": {"PLAN": "plan.json", "output": "report.html"},
}
SEEN = SearchSeen
