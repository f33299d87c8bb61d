"""Plans drawn at random from the whole space that the runtime trains, each with a small model to try parity on."""

from dataclasses import replace
from random import Random
from typing import Literal

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.check.parity.parity import Case, small_case
from paddlenlp_galvatron.check.validation.plans import mixed
from paddlenlp_galvatron.model import TRAINED
from paddlenlp_galvatron.plan import Assumptions, DataParallel, LayerStrategy, Plan, Precision, VocabStrategy
from paddlenlp_galvatron.plan.mesh import divisors

DENSE = [name for name, family in TRAINED.items() if not family.mixture]
LAYERS = (2, 3, 3, 4, 5, 6)
SAMPLES = (1, 1, 2, 2, 3, 4)  # of a rank in a step
OPTIMIZERS: tuple[Literal["sgd", "adamw"], ...] = ("sgd", "adamw")
KV_HEADS = (None, None, 1, 2, 3)  # None: as many as the family is used to


def random_cases(
    count: int, world_size: int, seed: int, precision: Precision = Precision.FP32, steps: int = 4
) -> list[Case]:
    """So many cases for a world; the same for the same arguments. Every other one is of either family."""
    random = Random(f"{seed}/{world_size}")
    cases: list[Case] = []
    while len(cases) < count:
        assumed = Assumptions(random.random() < 0.6, precision, random.random() < 0.7)
        layers = (LayerStrategy(),) * random.choice(LAYERS)
        base = Plan(world_size, world_size * random.choice(SAMPLES), 1, (len(layers),), layers, assumed=assumed)
        plan = mixed(random, base)
        parts = [_sharded(random, plan, part) for part in (*plan.layers, plan.vocab)]
        plan = replace(plan, layers=tuple(parts[:-1]), vocab=parts[-1])
        family, optimizer = DENSE[len(cases) % len(DENSE)], random.choice(OPTIMIZERS)
        tied, kv_heads = random.random() < 0.3, random.choice(KV_HEADS)
        try:
            cases.append(small_case(plan, family, optimizer, steps, seed, tied=tied, kv_heads=kv_heads))
        except UserError:  # degrees that do not go together, or kv heads that do not split
            continue
    return cases


def _sharded(random: Random, plan: Plan, part: LayerStrategy | VocabStrategy) -> LayerStrategy | VocabStrategy:
    """Mostly over all of the ranks that hold the same weights."""
    sizes = divisors(plan.stage_size // part.tp)[1:-1] if part.dp_type is not DataParallel.DDP else []
    return replace(part, sharding=random.choice(sizes)) if sizes and random.random() < 0.4 else part
