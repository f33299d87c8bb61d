"""An option of the search changes the searched space, the prices, or the answer: none is read and then dropped."""

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cost_examples import COMPUTATION, HARDWARE, MEMORY, MODEL, SEQ

from paddlenlp_galvatron.model import config_of
from paddlenlp_galvatron.options.prices import JobOptions
from paddlenlp_galvatron.planner.branches import Branches
from paddlenlp_galvatron.planner.question import Question
from paddlenlp_galvatron.profiles import Collective, MessageGroup, Shape

from .test_experts import SMALL

BASE = {"model_size": "example.json", "num_nodes": 2, "num_gpus_per_node": 4, "memory_constraint": 8}
BASE |= {"settle_bsz": 32, "seq_length": SEQ, "default_dp_type": "ddp"}
NARROW = {"max_tp_deg": 2, "max_pp_deg": 2, "disable_vtp": 1}
MIXTURE = {"model_size": "mixture.json", "device": "h100-80gb", "settle_bsz": 8, "seq_length": 64, **NARROW}
# Experts that must be shared out.
SPREAD = {"model_size": "qwen3-30b-a3b", "device": "h100-80gb", "memory_constraint": 80, "settle_bsz": 8}
SPREAD |= {"seq_length": 4096, "disable_sdp": 1, "max_pp_deg": 2}
TIGHT = {"memory_constraint": 0.9}  # GB, in which every strategy counts
BATCHES = {"settle_bsz": -1, "min_bsz": 8, "max_bsz": 32}
SHEET = {"device": "h100-80gb"}


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory) -> Iterator[None]:
    """Profiles in configs/; in other/ a quicker network and more memory."""
    with chdir(tmp_path_factory.mktemp("search")):
        Path("example.json").write_text(json.dumps(config_of(MODEL)))
        Path("mixture.json").write_text(json.dumps(config_of(SMALL)))
        for profile in (HARDWARE, COMPUTATION, MEMORY):
            profile.save(Path("configs"))
        faster = {key: 2 * speed for key, speed in HARDWARE.allreduce_mib_per_ms.items()}
        messages = {MessageGroup(Collective.ALL_REDUCE, size): {1.0: 0.01, 1024.0: 1.0} for size in (2, 4, 8)}
        other = replace(HARDWARE, allreduce_mib_per_ms=faster, p2p_mib_per_ms={2: 90, 4: 90, 8: 90}, overlap_coe=2.0)
        replace(other, messages_ms=messages).save(Path("other"))
        ms = {Shape(at.batch, at.seq): 1 + at.batch / 10 for at in COMPUTATION.other_ms}
        replace(COMPUTATION, layer_ms={0: ms}, other_ms=ms).save(Path("other"))
        layers = {key: {SEQ: tripled(by[SEQ])} for key, by in MEMORY.layers.items()}
        vocab = {key: {SEQ: tripled(by[SEQ])} for key, by in MEMORY.vocab.items()}
        replace(MEMORY, layers=layers, vocab=vocab).save(Path("other"))
        yield


def tripled(memory: Any) -> Any:
    return replace(memory, activation_mib={degree: 3 * mib for degree, mib in memory.activation_mib.items()})


def space(question: Question) -> Any:
    """Every family of plans, with its strategies of layers and of the vocabulary."""
    branches = Branches(question.cost, question.options).strategies()
    return {str(family): [(one.layers, one.vocabularies) for one in some] for family, some in branches.items()}


def best(question: Question) -> Any:
    """The strategies that are found, with their price, or the memory that they lack."""
    result = question.search()
    found = result.best or result.need
    assert found
    plan = found.plan
    return plan.layers, plan.vocab, plan.stages, plan.default_dp_type, found.prediction


def assumed(question: Question) -> Any:
    return question.search().require().plan.assumed


def answer(question: Question) -> Any:
    result = question.search()
    return len(result.runners_up), Counter(result.outcomes.values()), result.gap


def job(question: Question, **values: Any) -> Any:
    return question.job(JobOptions.from_values(values), question.search().best)


ROWS = [
    *((name, value, space, context) for name, value, context in (
        ("min_bsz", 16, BATCHES),
        ("max_bsz", 16, BATCHES),
        ("bsz_scale", 12, BATCHES),
        ("settle_bsz", 16, {}),
        ("settle_chunk", 4, {}),
        ("search_space", "dp+tp", {}),
        ("sp_space", "sp", {}),
        ("max_tp_deg", 1, {}),
        ("max_cp_deg", 2, {}),
        ("max_ep_deg", 1, MIXTURE),
        ("max_etp_deg", 2, MIXTURE),
        ("sharding_sizes", "0", {}),
        ("max_pp_deg", 1, {}),
        ("max_virtual_pp_deg", 2, {}),
        ("disable_dp", 1, {}),
        ("disable_sdp", 1, {}),
        ("disable_tp", 1, {}),
        ("disable_sp", 1, {"sp_space": "tp+sp"}),
        ("disable_cp", 1, {"max_cp_deg": 2}),
        ("disable_ep", 1, MIXTURE),
        ("disable_etp", 1, MIXTURE | {"max_etp_deg": 2}),
        ("disable_pp", 1, {}),
        ("disable_ckpt", 1, {}),
        ("recompute_parts", 1, {}),
        ("disable_vtp", 1, {}),
        ("embed_sdp", 1, {}),
        ("tp_consec", 0, {}),
        ("pipeline_type", "gpipe", {}),
    )),
    *((name, value, best, context) for name, value, context in (
        ("fine_grained_mode", 0, TIGHT),
        ("device", "h100-80gb", {}),
        ("task", "lora", SHEET),
        ("lora_rank", 4, SHEET | {"task": "dpo"}),
        ("document_tokens", 9, SHEET),
        ("context_mib", 7000, {}),
        ("moe_imbalance", 1.9, SPREAD),
        ("moe_imbalance_bound", 3, SPREAD),
        ("experts_one_by_one", 1, MIXTURE),
        ("offload_optimizer", 1, SHEET | {"memory_constraint": 2}),
        ("offload_activations", 1, SHEET | {"memory_constraint": 2}),
        ("default_dp_type", "ddp", {}),
        ("trainer", "paddlenlp", TIGHT),
        ("sequence_parallel", 0, {}),
        ("no_async_grad_reduce", 1, {}),
        ("amp_master_grad", 0, {}),
        ("profiles", "other", {}),
        ("time_profiling_path", "other", {}),
        ("memory_profiling_path", "other", TIGHT),
        ("allreduce_bandwidth_config_path", "other", {}),
        ("p2p_bandwidth_config_path", "other", {"disable_dp": 1, "disable_sdp": 1}),
        ("overlap_coe_path", "other", {"disable_pp": 1}),
        ("sp_time_path", "other", {"disable_dp": 1}),
        ("simplest_within", 100, TIGHT),
    )),
    ("use_flash_attention", 1, assumed, {}),  # it is in the plan, and training reads it
    ("top_k", 2, answer, {}),
    ("effort", 1, answer, TIGHT),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "view", "context"), [pytest.param(*row, id=row[0]) for row in ROWS])
def test_an_option_of_the_search_has_an_effect(name: str, value: object, view: Any, context: dict[str, Any]) -> None:
    without = BASE | context
    without = {option: given for option, given in without.items() if option != name or name in BATCHES}
    assert view(Question.of(without)) != view(Question.of(without | {name: value}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_train_epochs", 2),
        ("price_per_gpu_hour", 2),
        ("save_gb_per_s", 5),
        ("mtbf_hours", 3),
        ("mtbf_hours", "node=9"),
        ("restart_s", 5),
    ],
)
def test_an_option_of_the_job_has_an_effect(name: str, value: float) -> None:
    question, context = Question.of(BASE), {"tokens": 1e6}
    if name in ("mtbf_hours", "restart_s"):
        context |= {"save_gb_per_s": 1} | ({"mtbf_hours": 9} if name == "restart_s" else {})
    assert job(question, **context) != job(question, **context, **{name: value})
