"""Hints: changes of a question's options that make training faster, each found by a separate search.

Options that the user has limited or that the prices do not cover are not tried.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

from ..base.errors import GalvatronError
from ..profiles.data_sheet import load_data_sheet
from .options import MOST_CONTEXT
from .question import Question, SharedTime
from .result import Candidate

LEAST_GAIN = 0.05  # gain in tokens/s per GPU that is worth a line
HINTS_S = 0.8  # processor time shared by all hints; as much again for a larger batch
FREE_S = 5.0  # time of the search without another trainer's limits
LONG = 8192  # sequence length from which splitting it may pay
NEIGHBOURS = 8  # batches within this part of the batch are its neighbours
TWOS = 64  # a batch is split by powers of two into micro-batches
OFFLOADS = "offload_optimizer", "offload_activations"
LARGER = 4  # factor of the global batch size that hides pipeline bubbles and gradient all-reduces


@dataclass(frozen=True, slots=True)
class Hint:
    """Options that pay, and the speed with them."""

    options: Mapping[str, Any]  # options to add to the user's
    tokens_per_s_per_gpu: float
    gain: float | None  # share by which a GPU is faster; None: without them nothing fits

    def summary(self) -> dict[str, Any]:
        """The hint as JSON values."""
        return {"options": dict(self.options), "tokens_per_s_per_gpu": self.tokens_per_s_per_gpu, "gain": self.gain}


def hints(question: Question, best: Candidate | None, chosen: Container[str]) -> list[Hint]:
    """Hints that gain `LEAST_GAIN` over the best plan, the largest gain first. `chosen`: options that the user set."""
    batch, *others = question.options.batches
    if others:  # several batches are neighbours already
        return []
    question = question.at(batch)
    if best and best.plan.chunks == 1:  # trials of several chunks take most of the time and seldom pay here
        question = question.changed(max_virtual_pp_deg=1)
    changes = list(_changes(question, chosen))
    time = SharedTime(HINTS_S, len(changes), least_s=0.0)
    now = speed_of(question.options.world_size, question.model.seq_length, best)
    best_of_kind: dict[tuple[str, ...], Hint] = {}  # the best of each kind
    for change in changes:
        plans = [best.plan] if best and not {"settle_bsz", "num_nodes"} & change.keys() else []
        try:
            better = question.changed(**change).search(known=plans, seconds=time.take(), compared=False).best
        except GalvatronError:
            continue  # the prices do not cover it
        nodes = change.get("num_nodes", question.options.num_nodes)
        speed = speed_of(nodes * question.options.num_gpus_per_node, question.model.seq_length, better)
        known_best = best_of_kind[kind].tokens_per_s_per_gpu if (kind := tuple(change)) in best_of_kind else 0.0
        if speed > max(now * (1 + LEAST_GAIN), known_best):
            best_of_kind[kind] = Hint(change, speed, speed / now - 1 if now else None)
    return sorted(best_of_kind.values(), key=lambda hint: -hint.tokens_per_s_per_gpu)


def larger_batch(question: Question, best: Candidate) -> Hint | None:
    """A batch of `LARGER` times the samples, if it makes each GPU faster; the model may then need other learning rates.
    None: it gains too little."""
    options, seq_length = question.options, question.model.seq_length
    batch = options.batches[0] * LARGER
    longer = replace(best.plan, global_batch=batch, micro_batches=best.plan.micro_batches * LARGER)
    try:
        larger = question.at(batch).search(known=[longer], seconds=HINTS_S, compared=False).best
    except GalvatronError:
        return None
    now, speed = (speed_of(options.world_size, seq_length, candidate) for candidate in (best, larger))
    change = {"num_nodes": options.num_nodes, "settle_bsz": batch}
    return Hint(change, speed, speed / now - 1) if speed > now * (1 + LEAST_GAIN) else None


def fewer_gpus(question: Question, best: Candidate) -> Hint | None:
    """Half of a single node's GPUs, if the model fits there with offloaded optimizer or activations, whichever is
    faster. None: it does not."""
    options, seq_length = question.options, question.model.seq_length
    gpus = options.world_size // 2
    if options.num_nodes > 1 or not gpus or any(getattr(options, name) for name in OFFLOADS) or not options.device:
        return None
    now, offers = speed_of(options.world_size, seq_length, best), []
    for name in OFFLOADS[: 1 + (options.trainer == "galvatron")]:
        try:
            change: dict[str, Any] = {"num_gpus_per_node": gpus, "world_size": gpus, name: True}
            half = question.changed(**change).search(seconds=HINTS_S / len(OFFLOADS), compared=False).best
        except GalvatronError:
            continue
        if speed := speed_of(gpus, seq_length, half):
            offers.append(Hint({name: True, "gpus": gpus}, speed, speed / now - 1))
    return max(offers, key=lambda hint: hint.tokens_per_s_per_gpu, default=None)


def free_plan(question: Question) -> Candidate | None:
    """The best plan for Galvatron's trainer; None: none was found in `FREE_S`."""
    return question.changed(trainer="galvatron").search(seconds=FREE_S, compared=False).best


def speed_of(gpus: int, seq_length: int, candidate: Candidate | None) -> float:
    """Tokens/s a GPU; 0: no plan."""
    return candidate.samples_per_s * seq_length / gpus if candidate else 0.0


def _changes(question: Question, chosen: Container[str]) -> Iterator[dict[str, Any]]:
    options, seq = question.options, question.options.seq_length or 0
    batch, free = options.settle_bsz, options.trainer == "galvatron"
    if "settle_chunk" not in chosen:
        yield from ({"settle_bsz": other} for other in _neighbours(batch, options.world_size))
    if seq >= LONG and options.world_size > 1:
        if free and options.most_context == 1 and not _limited(chosen, "max_cp_deg", "disable_cp", "search_space"):
            yield {"max_cp_deg": min(MOST_CONTEXT, options.world_size)}
        if free and not _limited(chosen, "sp_space", "disable_sp", "search_space", "tp_consec"):
            yield {"sp_space": "tp+sp"}
    if options.task in ("sft", "dpo") and "lora_rank" not in chosen and not options.trained.frozen:
        yield {"task": "lora"} if options.task == "sft" else {"lora_rank": 8}
    if options.trainer in ("galvatron", "paddlefleet"):
        yield from ({name: True} for name in OFFLOADS[: 1 + free] if name not in chosen)
    if options.device and load_data_sheet(options.device).gpus_per_node <= options.num_gpus_per_node:  # whole nodes
        yield from ({"num_nodes": nodes} for nodes in (options.num_nodes - 1, options.num_nodes + 1) if nodes)


def _limited(chosen: Container[str], *names: str) -> bool:
    return any(name in chosen for name in names)


def _neighbours(batch: int, gpus: int) -> Iterator[int]:
    """The next smaller and larger batch that divides better among GPUs and micro-batches."""

    def parts(number: int) -> int:
        return gcd(number, TWOS * gpus)

    reach = batch // NEIGHBOURS
    for side in (range(batch - 1, batch - reach - 1, -1), range(batch + 1, batch + reach + 1)):
        if (other := max(side, key=parts, default=batch)) and parts(other) > parts(batch):
            yield other
