"""Random plans from the whole search space."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from random import Random

from ...base.errors import UserError
from ...model.layer import PARTLY
from ...plan import Assumptions, DataParallel, LayerStrategy, ModelShape, Plan, Recompute, Schedule, VocabStrategy
from ...plan.check import require_valid
from ...plan.mesh import divisors, every_degrees
from ...plan.uniform import even_stages

MOST_MISSES = 1000  # successive misses before the space counts as exhausted
AGAIN = 0.3  # share of layers with recompute


def sample_plans(
    shape: ModelShape,
    world_size: int,
    global_batch: int,
    assumed: Assumptions,
    count: int,
    seed: int,
    priced: Callable[[Plan], bool],
) -> Iterator[tuple[str, Plan]]:
    """`count` different pairs (kind, plan), or fewer if no more were found; deterministic.

    Kinds: one strategy for all layers, or everything mixed. `priced`: whether the cost model can price a plan.
    """
    random = Random(f"{seed}/{shape.fingerprint}/{world_size}/{global_batch}")
    layers = (LayerStrategy(),) * shape.layers
    base = Plan(world_size, global_batch, 1, (shape.layers,), layers, assumed=assumed)
    seen: set[Plan] = set()
    misses = 0
    while len(seen) < count and misses < MOST_MISSES:
        kind = [*_DRAWN][(len(seen) + misses) % len(_DRAWN)]
        plan = _DRAWN[kind](random, base)
        if plan in seen or not _runs(plan, shape) or not priced(plan):
            misses += 1
            continue
        seen.add(plan)
        misses = 0
        yield kind, plan


def _runs(plan: Plan, shape: ModelShape) -> bool:
    try:
        require_valid(plan, shape)
    except UserError:  # incompatible degrees, or degrees that do not divide the model
        return False
    return True


def _uniform(random: Random, base: Plan) -> Plan:
    plan = _framed(random, base, even=True)
    return replace(plan, layers=(_layer(random, plan),) * len(plan.layers))


def mixed(random: Random, base: Plan) -> Plan:
    """A plan with the ranks, layers and samples of `base` and every other dimension random."""
    plan = _framed(random, base, even=False)
    return replace(plan, layers=tuple(_layer(random, plan) for _ in plan.layers))


_DRAWN: dict[str, Callable[[Random, Plan], Plan]] = {"uniform": _uniform, "mixed": mixed}  # kinds, drawn in turn


def _framed(random: Random, base: Plan, even: bool) -> Plan:
    """Random stages, schedule, micro-batches and vocabulary; the layers are unchanged."""
    count = len(base.layers)
    stages = random.choice([pp for pp in divisors(base.world_size) if pp <= count])
    plan = _pipelined(random, base, stages, even)
    default = random.choice((DataParallel.DDP, DataParallel.ZERO2))
    degrees = random.choice(every_degrees(plan.stage_size))
    vocab = VocabStrategy(**degrees.named, dp_type=random.choice((default, default, DataParallel.ZERO3)))
    return replace(plan, default_dp_type=default, vocab=vocab)


def _pipelined(random: Random, base: Plan, stages: int, even: bool) -> Plan:
    count = len(base.layers)
    stages = min(stages, count)
    schedule = random.choice(tuple(Schedule))
    chunks = random.randint(1, count // stages) if stages > 1 and schedule.of_chunks else 1
    cuts = [0, *sorted(random.sample(range(1, count), stages * chunks - 1)), count]
    uneven = tuple(stop - start for start, stop in pairwise(cuts))
    cut = even_stages(count, stages * chunks) if even else uneven
    micro_batches = random.choice(divisors(max(1, base.global_batch * stages // base.world_size)))
    return replace(base, stages=cut, micro_batches=micro_batches, schedule=schedule, chunks=chunks)


def _layer(random: Random, plan: Plan) -> LayerStrategy:
    size = plan.stage_size
    degrees = random.choice(every_degrees(size))
    strided = random.random() < 1 / 4 and degrees.ranks not in (1, size)
    return LayerStrategy(
        **degrees.named,
        consecutive=not strided,
        dp_type=random.choice((plan.default_dp_type, plan.default_dp_type, DataParallel.ZERO3)),
        recompute=random.choice((Recompute.FULL, *PARTLY)) if random.random() < AGAIN else Recompute.NONE,
    )
