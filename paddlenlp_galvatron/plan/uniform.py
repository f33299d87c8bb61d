"""Plans of like layers: their stages, and their micro-batches."""

from dataclasses import replace

from .check import find_faults
from .mesh import divisors
from .strategy import Plan


def even_stages(layers: int, stages: int) -> tuple[int, ...]:
    """Layers per stage, as even as possible; the first stages take the remainder (the last has the LM head)."""
    return tuple(layers // stages + (stage < layers % stages) for stage in range(stages))


def one_sample_each(plan: Plan) -> Plan:
    """A plan of equal layers with as many micro-batches as possible: one sample per data-parallel rank if the batch
    allows. This needs the least memory and has the smallest pipeline bubble."""
    dp = plan.dp(plan.layers[0])
    for count in reversed(divisors(plan.global_batch)):
        made = replace(plan, micro_batches=count)
        if plan.global_batch % (count * dp) == 0 and not find_faults(made):
            return made
    return plan
