"""Layer-wise plans for the parity tests, as a list of named cases a world size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paddlenlp_galvatron.plan import Assumptions, LayerStrategy, Plan, Schedule, VocabStrategy
from paddlenlp_galvatron.plan.check import require_valid


def layers(code: str) -> tuple[LayerStrategy, ...]:
    """Strategies from words: a degree, then u = Ulysses, s = strided groups, r = recompute. "1 2r 2u 4s" is 4 layers."""
    return tuple(
        LayerStrategy(int(word.rstrip("usr")), ulysses="u" in word, consecutive="s" not in word, recompute="r" in word)
        for word in code.split()
    )


@dataclass(frozen=True)
class Named:
    """A plan, what it is there for, and the model and optimizer that try it."""

    name: str
    plan: Plan
    family: str = "llama"
    optimizer: Literal["sgd", "adamw"] = "sgd"


def plan(
    world_size: int,
    code: str,
    stages: tuple[int, ...] | None = None,
    *,
    vocab: str = "1",
    micro_batches: int = 2,
    batch: int = 8,
    megatron_sp: bool = True,
    schedule: Schedule = Schedule.ONE_F_ONE_B,
) -> Plan:
    strategies = layers(code)
    [head] = layers(vocab)
    made = Plan(
        world_size=world_size,
        global_batch=batch,
        micro_batches=micro_batches,
        stages=stages or (len(strategies),),
        layers=strategies,
        vocab=VocabStrategy(head.degree, head.ulysses),
        schedule=schedule,
        assumed=Assumptions(sequence_parallel=megatron_sp),
    )
    require_valid(made)
    return made


TWO = [
    Named("tp 1-2 with Megatron-SP, recompute", plan(2, "1 2r 2 1r", vocab="2"), "qwen2"),
    Named("tp 1-2 without Megatron-SP", plan(2, "1 2r 2 1", vocab="2", megatron_sp=False), "llama", "adamw"),
    Named("two stages, 1F1B, more micro-batches than stages", plan(2, "1 1r 1", (1, 2), micro_batches=4), "qwen2"),
    Named("Ulysses beside dp, vocabulary by sequence", plan(2, "2u 1 2ur", vocab="2u"), "llama"),
]
FOUR = [
    Named("tp 1-2-4 with Megatron-SP", plan(4, "1 2r 4 2", vocab="4"), "qwen2"),
    Named("tp 1-2-4 without Megatron-SP", plan(4, "1 2r 4 2 1", vocab="2", megatron_sp=False), "llama"),
    Named("uneven stages, tp with Megatron-SP", plan(4, "1 2r 2 1 2", (2, 3), vocab="2", micro_batches=4), "qwen2"),
    Named(
        "GPipe, uneven stages, tp without Megatron-SP, plain vocabulary",
        plan(4, "1 2r 2 1 2", (3, 2), micro_batches=4, megatron_sp=False, schedule=Schedule.GPIPE),
        "llama",
        "adamw",
    ),
    Named("four stages, fewer micro-batches than stages", plan(4, "1 1r 1 1 1", (1, 2, 1, 1), batch=4), "llama"),
    Named("strided tp with Megatron-SP", plan(4, "2s 2 2sr 1", vocab="2"), "qwen2"),
    Named("strided tp without Megatron-SP", plan(4, "2s 2 2sr 4", vocab="2", megatron_sp=False), "qwen2", "adamw"),
    Named("Ulysses, tp and dp mixed", plan(4, "2u 2 4ur 1", vocab="4", megatron_sp=False), "qwen2"),
]
SIX = [
    Named("3-way and 6-way tp", plan(6, "3 6r 2 1", vocab="3", batch=12), "llama"),
    Named(
        "three stages, 2-way Ulysses", plan(6, "2u 1 2r 2", (1, 1, 2), vocab="2", micro_batches=3, batch=12), "qwen2"
    ),
]
EIGHT = [
    Named("tp 1-8 and back", plan(8, "1 2 4r 8 1", vocab="8", batch=16), "llama"),
    Named(
        "two stages of four, all mixed",
        plan(8, "1 2r 4 2u 4sr 1", (3, 3), vocab="2", micro_batches=4, batch=16, megatron_sp=False),
        "qwen2",
    ),
    Named(
        "four stages of two",
        plan(8, "2 1 2r 1 1", (1, 1, 1, 2), vocab="2", micro_batches=4, batch=16),
        "qwen2",
        "adamw",
    ),
]
