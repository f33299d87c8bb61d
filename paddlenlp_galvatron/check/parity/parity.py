"""Proves a plan: trains a small random model under it on CPU processes and, by PaddleNLP's own model, in one process.

They share only initial weights and data; loss and every gradient must agree.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import pairwise
from math import lcm, nan, prod, sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from ...base.errors import UserError
from ...base.writing import scratch_folder
from ...model import FAMILIES, Adapters, Preference
from ...model.families import Family
from ...plan import Assumptions, LayerStrategy, ModelShape, Plan, Precision, plan_from_dict, plan_to_dict, require_valid
from ...plan.layout import chunks_of_a_sample
from ...training.recipe import Recipe

if TYPE_CHECKING:
    from ...runtime.batch import Batch

Gradients = dict[str, NDArray[np.float32]]

WORKER = f"{__package__}.parity_worker"
LEARNING_RATES = {"sgd": 0.05, "adamw": 1e-3}
# How far gradients may be from one fp32 process, relative to the largest of their tensor.
TOLERANCES = {Precision.FP32: 1e-4, Precision.BF16: 1e-1, Precision.FP16: 2e-2}
LOSS_TOLERANCE = 1e-5  # fp32's tolerance
# Relative rounding errors of 16 bits. A token's loss is off by a few roundings, the mean of n tokens by 1 / sqrt(n) of
# that; rounded weights change all tokens. In 50 seeds of each family and each plan of gpu-check, with 7 to 128 tokens,
# losses in bf16 were within 40 % of `Parity.limits` (as with 4,096 tokens), and gradients within 9e-2.
ROUNDING = {Precision.FP32: 0.0, Precision.BF16: 2**-9, Precision.FP16: 2**-12}
TOKEN_ROUNDINGS, WEIGHT_ROUNDINGS = 16, 0.5
MAX_GRAD_NORM = 0.5  # below the norms that occur, so that clipping is tested
FLOOR = 1e-8  # of the global norm, or one rounding; smaller gradients are noise and need not agree
HEAD_DIM = 8
BALANCE = 0.1  # coefficient of the balance loss, large enough for its gradients to show
VOCABULARY = 251  # a prime, so that every vtp > 1 pads


@dataclass(frozen=True)
class Case:
    """One plan to prove, with the model that it trains."""

    plan: Plan
    shape: ModelShape
    optimizer: Literal["sgd", "adamw"] = "sgd"
    steps: int = 4
    seed: int = 0
    lora_rank: int = 0  # LoRA: only adapters are trained; 0: none
    packed: bool = False  # rows hold several documents, of which some tokens have no label
    loss: str = ""  # preference loss of `model.preference`; "": loss of tokens

    @property
    def seq_length(self) -> int:
        return self.plan.assumed.seq_length or 16

    @property
    def adapters(self) -> Adapters | None:
        return Adapters(self.lora_rank, 2 * self.lora_rank) if self.lora_rank else None

    @property
    def preference(self) -> Preference | None:
        """The preference loss of this case; None: none."""
        if not self.loss:
            return None
        smoothing = 0.1 if self.loss == "sigmoid" else 0.0
        return Preference(self.loss, 0.3, smoothing, ratio=0.8, sft_ratio=0.2, dpop_lambda=2)  # type: ignore[arg-type]

    @property
    def recipe(self) -> Recipe:
        rate = LEARNING_RATES[self.optimizer]
        return Recipe(
            optim=self.optimizer,
            learning_rate=rate,
            lr_scheduler_type="constant",
            weight_decay=0.01,
            max_grad_norm=MAX_GRAD_NORM,
        )

    @property
    def compared_steps(self) -> int:
        """Steps whose gradients are compared: with AdamW only the first, as later ones amplify rounding."""
        return self.steps if self.optimizer == "sgd" else 1


@dataclass(frozen=True)
class Parity:
    """The differences between training under a plan and in one process."""

    max_loss_diff: float
    max_grad_rel_diff: float  # largest |g - g1| of a tensor over max(max |g1|, FLOOR x global norm)
    worst_gradient: str
    losses: list[float]
    losses_one_process: list[float]
    groups: list[int]  # communicators of each rank
    seconds: float
    precision: Precision = Precision.FP32
    tokens: int = 1  # with a label, in the step that has fewest

    @property
    def limits(self) -> tuple[float, float]:
        """Largest allowed differences of losses and gradients."""
        loss = ROUNDING[self.precision] * (TOKEN_ROUNDINGS / sqrt(max(1, self.tokens)) + WEIGHT_ROUNDINGS)
        return loss or LOSS_TOLERANCE, TOLERANCES[self.precision]

    def __str__(self) -> str:
        loss, gradient = self.limits
        word = "PASS" if self.agrees else "FAIL"
        return (
            f"{word}: losses within {self.max_loss_diff:.1e} (limit {loss:.0e}), gradients within "
            f"{self.max_grad_rel_diff:.1e} (limit {gradient:.0e})"
        )

    @property
    def agrees(self) -> bool:
        """Whether rounding explains the differences."""
        loss, gradient = self.limits
        return self.max_loss_diff <= loss and self.max_grad_rel_diff <= gradient  # not for NaN


def small_case(
    plan: Plan,
    family: str,
    optimizer: Literal["sgd", "adamw"] = "sgd",
    steps: int = 4,
    seed: int = 0,
    *,
    tied: bool = False,
    vocabulary: int = VOCABULARY,
    packed: bool = False,
    lora_rank: int = 0,
    loss: str = "",
    **of_shape: Any,
) -> Case:
    """A case for a plan: the smallest model that all its degrees split, with GQA where the family uses it. `of_shape`:
    other fields of `ModelShape`."""
    parts = (*plan.layers, plan.vocab)
    degrees = lcm(*(strategy.degree for strategy in parts))
    heads = 2 * max(degrees, 2)
    traits = FAMILIES[family]
    kv_heads = of_shape.pop("kv_heads", None) or heads // traits.heads_per_kv_head
    if heads % kv_heads:
        raise UserError(f"kv_heads: {heads} heads do not share {kv_heads} kv heads evenly")
    chunks = (strategy.degree * prod(chunks_of_a_sample(*axis) for axis in strategy.extra) for strategy in parts)
    tokens = lcm(*chunks)  # a sample is a multiple of these
    seq_length = -(-16 // tokens) * tokens
    shape = ModelShape(
        name=f"small-{family}",
        family=family,
        layers=len(plan.layers),
        hidden_size=heads * HEAD_DIM,
        intermediate_size=6 * degrees * HEAD_DIM,
        heads=heads,
        kv_heads=kv_heads,
        vocab_size=vocabulary,
        max_position_embeddings=seq_length,
        tied_embeddings=tied,
        initializer_range=0.1,
        **{**traits.example, **(_experts(plan, traits) if traits.mixture else {}), **of_shape},
    )
    plan = replace(plan, assumed=replace(plan.assumed, seq_length=seq_length))
    require_valid(plan, shape)
    if optimizer not in LEARNING_RATES:
        raise UserError(f"optimizer: {optimizer!r} is unknown; choose one of {', '.join(LEARNING_RATES)}")
    return Case(plan, shape, optimizer, steps, seed, lora_rank, packed, loss)


def _experts(plan: Plan, traits: Family) -> dict[str, Any]:
    """The smallest numbers of experts and of their columns that all degrees divide, and a balance loss.

    In 16 bits every token uses all experts, as rounding may change the choice between nearly equal scores.
    """
    assert traits.mixture
    groups: int = traits.example.get("expert_groups", 1)
    experts = 2 * groups * lcm(2, *(layer.ep for layer in plan.layers))
    choosing = not plan.assumed.mixed_precision.mixed
    sizes: dict[str, Any] = {
        "experts": experts,
        "experts_per_token": 2 if choosing else experts,
        "expert_size": 12 * lcm(*(layer.etp for layer in plan.layers)),
        "router_aux_loss_coef": BALANCE,
    }
    shared = 6 * HEAD_DIM * lcm(*(layer.degree for layer in plan.layers))
    if not choosing:
        sizes["groups_per_token"] = groups
    return sizes | ({"shared_size": shared} if traits.mixture.shared else {})


def batch_of(case: Case, step: int) -> Batch:
    """The global batch of a step, identical on all ranks."""
    from ...runtime.batch import IGNORED_LABEL, Samples

    random = np.random.default_rng([case.seed, step])
    rows, length = case.plan.global_batch, case.seq_length
    tokens: NDArray[np.int64] = random.integers(0, case.shape.vocab_size, (rows, length + 1))
    if case.loss:
        return _pairs(tokens, random, case.shape.vocab_size)
    if not case.packed:
        return tokens
    ids, labels, ends = tokens[:, :-1], tokens[:, 1:].copy(), np.full((rows, length), length)
    for row in range(rows):
        edges = [0, *sorted(random.choice(np.arange(1, length), size=random.integers(0, 4), replace=False)), length]
        for start, stop in pairwise(edges):
            ends[row, start:stop] = stop
            labels[row, start : random.integers(start, stop)] = IGNORED_LABEL  # the prompt
            labels[row, stop - 1] = IGNORED_LABEL
    labels[: rows // 2 * (step % 2)] = IGNORED_LABEL  # micro-batches without any label
    labels[-1, 0] = tokens[-1, 1]
    return Samples(ids, labels, ends)


def _pairs(tokens: NDArray[np.int64], random: np.random.Generator, vocab_size: int) -> Batch:
    """Rows of one or two pairs, with or without padding at the end; every third row has no pair."""
    from ...runtime.batch import IGNORED_LABEL, Samples

    rows, length = len(tokens), tokens.shape[1] - 1
    ids, labels = tokens[:, :-1], np.full((rows, length), IGNORED_LABEL)
    ends, facts = np.full((rows, length), length), np.zeros((rows, 2, 4), np.float32)
    for row in range(rows):
        answers = 0 if row % 3 == 2 else 4 if row % 3 else 2
        cuts = random.choice(np.arange(1, length // 2), size=max(answers - 1, 0), replace=False) * 2
        edges = [0, *sorted(cuts.tolist()), length - int(random.integers(2))]
        for number, (start, stop) in enumerate(pairwise(edges) if answers else ()):
            ends[row, start:stop] = stop
            first = int(random.integers(start, stop))
            labels[row, first:stop] = tokens[row, first + 1 : stop + 1]
            pair, side = divmod(number, 2)
            facts[row, pair, 2 + side] = stop - first
            facts[row, pair, side] = -(stop - first) * np.log(vocab_size) + random.normal()
    return Samples(ids, labels, ends, facts)


def check_parity(cases: Sequence[Case], timeout_s: float = 300, device: Literal["cpu", "gpu"] = "cpu") -> list[Parity]:
    """Run all cases (plans of one world size) in a single launch and compare each with one process.

    On GPUs, TF32 is off; the one process always computes on the CPU.
    """
    from ...launch.processes import devices_of, launch

    worlds = {case.plan.world_size for case in cases}
    if len(worlds) != 1:
        raise ValueError(f"cases of one launch need one world size, not {sorted(worlds)}")
    devices_of(min(worlds), device)  # fails before large cases are written
    with scratch_folder("galvatron-parity-") as folder:
        write_cases(folder, cases)
        launch(WORKER, [str(folder)], worlds.pop(), folder / "log", timeout_s, device=device)
        return compare(folder, cases)


def write_cases(folder: Path, cases: Sequence[Case]) -> None:
    """Write the cases for the ranks of a launch of WORKER. Its arguments are the folder and the number of the first
    case to train (default 0)."""
    written = []
    for case in cases:
        run = {name: value for name, value in vars(case).items() if name not in ("plan", "shape")}
        written.append({"plan": plan_to_dict(case.plan), "shape": asdict(case.shape), "run": run})
    (folder / "cases.json").write_text(json.dumps(written))


def compare(folder: Path, cases: Sequence[Case]) -> list[Parity]:
    """Compare the ranks' files of every case with one process."""
    return [compare_case(folder, case, index) for index, case in enumerate(cases)]


def read_cases(folder: Path) -> list[Case]:
    """The cases that `write_cases` left for the ranks."""
    shape_of = TypeAdapter(ModelShape).validate_python
    items = json.loads((folder / "cases.json").read_text())
    return [Case(plan_from_dict(item["plan"]), shape_of(item["shape"]), **item["run"]) for item in items]


def compare_case(folder: Path, case: Case, index: int) -> Parity:
    """Compare the ranks' files of a case with one process."""
    from ...runtime.batch import IGNORED_LABEL, samples_of
    from ...runtime.weights import Slice

    precision = case.plan.assumed.mixed_precision
    tokens = min((samples_of(batch_of(case, step)).labels != IGNORED_LABEL).sum() for step in range(case.steps))
    losses, gradients = _one_process(_data_only(case))
    worst, worst_name, groups, seconds = 0.0, "", [], 0.0
    compared: set[tuple[int, str]] = set()
    measured: list[float] = []
    evaluated = nan
    for rank in range(case.plan.world_size):
        report = json.loads((folder / f"{index}.{rank}.json").read_text())
        measured, evaluated = report["losses"], report["evaluated"]
        groups.append(report["groups"])
        seconds = max(seconds, report["seconds"])
        with np.load(folder / f"{index}.{rank}.npz") as arrays:
            for step in range(case.compared_steps):
                norm = np.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in gradients[step].values()))
                for key, piece in ((key, piece) for key, pieces in report["pieces"].items() for piece in pieces):
                    weight, start, stop = piece["weight"], piece["start"], piece["stop"]
                    reference = gradients[step][weight]
                    scale = max(float(np.abs(reference).max()), max(FLOOR, ROUNDING[precision]) * norm)
                    expected = Slice(**piece["slice"]).of(reference).flatten()[start:stop]
                    flat = arrays[f"{step}.{key}"].flatten()[piece["offset"] :][: stop - start]
                    distance = float(np.abs(flat - expected).max()) / scale
                    compared.add((step, weight))
                    if not distance <= worst:  # NaN counts as worst
                        worst, worst_name = distance, f"{weight} on rank {rank} in step {step}"
    missing = {(step, weight) for step in range(case.compared_steps) for weight in gradients[step]} - compared
    if missing:
        raise AssertionError(f"no rank has the gradients of {sorted(missing)[:3]}")
    pairs = zip([*measured, evaluated], [*losses, losses[-1]], strict=True)
    difference = max(abs(ours - theirs) for ours, theirs in pairs)
    if case.loss:
        expected = _answers(replace(_data_only(case), lora_rank=0))
        found_sums = np.array(report["answers"])
        distances = np.abs(found_sums[found_sums != 0] - expected) / np.maximum(1, np.abs(expected))
        difference = max(difference, float(distances.max()))
    return Parity(difference, worst, worst_name, measured, losses, groups, seconds, precision, int(tokens))


def _data_only(case: Case) -> Case:
    """The case without its strategy: cases that differ only in it share one reference run."""
    layers = len(case.plan.layers)
    plan = Plan(
        world_size=1,
        global_batch=case.plan.global_batch,
        micro_batches=1,
        stages=(layers,),
        layers=(LayerStrategy(),) * layers,
        assumed=Assumptions(seq_length=case.seq_length),
    )
    return replace(case, plan=plan)


@lru_cache(maxsize=16)
def _answers(case: Case) -> NDArray[np.float32]:
    """Log-probabilities of the first step's answers by the base model, row by row."""
    from ...runtime.device import on_cpu
    from .case_weights import CaseWeights
    from .one_process import answers_of

    with on_cpu():
        return answers_of(
            case.shape, case.seq_length, CaseWeights(case.seed, case.shape.initializer_range), batch_of(case, 0)
        )


@lru_cache(maxsize=16)
def _one_process(case: Case) -> tuple[list[float], list[Gradients]]:
    """Losses of all steps, and gradients of the compared ones."""
    from ...runtime.device import on_cpu
    from .case_weights import CaseWeights
    from .one_process import train_one_process

    batches = (batch_of(case, step) for step in range(case.steps))
    source = CaseWeights(case.seed, case.shape.initializer_range)
    with on_cpu():
        arguments = case.recipe, batches, case.adapters, case.preference
        results = list(train_one_process(case.shape, case.seq_length, source, *arguments))
    return [loss for loss, _ in results], [gradients for _, gradients in results[: case.compared_steps]]
