"""Plans drawn at random from the whole space that the runtime trains, each with a small model to try parity on."""

from __future__ import annotations

from random import Random
from typing import Literal

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.check.parity.parity import Case, small_case
from paddlenlp_galvatron.model import FAMILIES
from paddlenlp_galvatron.model.layer import PARTLY
from paddlenlp_galvatron.plan import (
    Assumptions,
    DataParallel,
    LayerStrategy,
    Plan,
    Precision,
    Recompute,
    Schedule,
    VocabStrategy,
)
from paddlenlp_galvatron.plan.check import require_valid
from paddlenlp_galvatron.plan.mesh import Degrees, divisors, every_degrees

DENSE = [name for name, family in FAMILIES.items() if not family.mixture]
LAYERS = (2, 3, 3, 4, 5, 6)
MICRO_BATCHES = (1, 2, 2, 3, 4)
OPTIMIZERS: tuple[Literal["sgd", "adamw"], ...] = ("sgd", "adamw")
KV_HEADS = (None, None, 1, 2, 3)  # None: as many as the family is used to


def random_cases(
    count: int, world_size: int, seed: int, precision: Precision = Precision.FP32, steps: int = 4
) -> list[Case]:
    """So many cases for a world; the same for the same arguments. Every other one is of either family."""
    random = Random(f"{seed}/{world_size}")
    cases: list[Case] = []
    while len(cases) < count:
        plan = _plan(random, world_size, precision)
        family, optimizer = DENSE[len(cases) % len(DENSE)], random.choice(OPTIMIZERS)
        tied, kv_heads = random.random() < 0.3, random.choice(KV_HEADS)
        try:
            require_valid(plan)
            cases.append(small_case(plan, family, optimizer, steps, seed, tied=tied, kv_heads=kv_heads))
        except UserError:  # degrees that do not go together, or kv heads that do not split
            continue
    return cases


def _plan(random: Random, world_size: int, precision: Precision) -> Plan:
    count = random.choice(LAYERS)
    stages = random.choice([pp for pp in divisors(world_size) if pp <= count])
    size = world_size // stages
    default = random.choice((DataParallel.DDP, DataParallel.ZERO2))
    micro_batches = random.choice(MICRO_BATCHES)
    schedule = random.choice((Schedule.ONE_F_ONE_B, Schedule.ONE_F_ONE_B, Schedule.GPIPE))
    chunks = random.randint(1, count // stages) if stages > 1 and schedule.of_chunks else 1
    return Plan(
        world_size=world_size,
        global_batch=micro_batches * size * random.choice((1, 1, 2)),
        micro_batches=micro_batches,
        stages=_division(random, count, stages * chunks),
        layers=tuple(_layer(random, size, default) for _ in range(count)),
        vocab=_vocab(random, size, default),
        default_dp_type=default,
        schedule=schedule,
        chunks=chunks,
        assumed=Assumptions(
            sequence_parallel=random.random() < 0.6, mixed_precision=precision, async_grad_reduce=random.random() < 0.7
        ),
    )


def _layer(random: Random, size: int, default: DataParallel) -> LayerStrategy:
    degree, kind = random.choice(divisors(size)), random.choice(("tp", "tp", "ulysses", "strided"))
    degrees = _degrees(random, size, degree, kind == "ulysses" and degree > 1)
    dp_type = random.choice((default, default, DataParallel.ZERO3))
    return LayerStrategy(
        **degrees.named,
        consecutive=kind != "strided" or degrees.ranks in (1, size),
        dp_type=dp_type,
        recompute=_recompute(random.random()),
        sharding=_sharding(random, size // degrees.tp, dp_type),
    )


def _sharding(random: Random, sharing: int, dp_type: DataParallel) -> int | None:
    """Mostly all of the ranks that hold the same weights."""
    parts = [part for part in divisors(sharing)[1:-1] if dp_type is not DataParallel.DDP]
    return random.choice(parts) if parts and random.random() < 0.4 else None


def _degrees(random: Random, size: int, degree: int, ulysses: bool) -> Degrees:
    """This degree, and next to it mostly none."""
    some = [one for one in every_degrees(size) if (one.degree, one.ulysses) == (degree, ulysses)]
    return random.choice(some) if random.random() < 0.3 else some[0]


def _recompute(number: float) -> Recompute:
    """From a number below 1: all of the layer below 0.15, some of its parts below 0.3."""
    if number >= 0.3:
        return Recompute.NONE
    return Recompute.FULL if number < 0.15 else PARTLY[int((number / 0.15 - 1) * len(PARTLY))]


def _vocab(random: Random, size: int, default: DataParallel) -> VocabStrategy:
    degree = random.choice(divisors(size))
    ulysses = degree > 1 and random.random() < 0.3
    dp_type = random.choice((default, default, DataParallel.ZERO3))
    degrees = _degrees(random, size, degree, ulysses)
    return VocabStrategy(**degrees.named, dp_type=dp_type, sharding=_sharding(random, size // degrees.tp, dp_type))


def _division(random: Random, layers: int, stages: int) -> tuple[int, ...]:
    cuts = sorted(random.sample(range(1, layers), stages - 1))
    return tuple(stop - start for start, stop in zip([0, *cuts], [*cuts, layers], strict=True))
