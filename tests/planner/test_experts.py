"""Strategies of experts are searched exactly: beaten ones are left out, and nothing is lost."""

from math import inf
from random import Random

import pytest

from paddlenlp_galvatron.cost_model import CostModel, LayerCost, StageSetting, States, Terms, derive
from paddlenlp_galvatron.cost_model.costs import PassTerms, Workspace
from paddlenlp_galvatron.model import ModelShape, load_model
from paddlenlp_galvatron.plan import Assumptions, DataParallel, LayerStrategy, Precision, Recompute
from paddlenlp_galvatron.plan.schedule import ByKind
from paddlenlp_galvatron.plan.strategy import Experts
from paddlenlp_galvatron.planner import SearchOptions, search
from paddlenlp_galvatron.planner.core_arrays import compute_bound_ms
from paddlenlp_galvatron.planner.space import PlanFamily, Space, Strategies
from paddlenlp_galvatron.profiles.data_sheet import load_data_sheet

from .random_cost import every_plan

SMALL = ModelShape("small", "qwen3_moe", 2, 512, 512, 4, 2, 1024, 64, experts=6, experts_per_token=2, expert_size=256)


class RandomHalves:
    """Prices of experts alone."""

    def __init__(self, seed: int):
        self._seed = seed

    def __call__(self, experts: Experts, recompute: Recompute, *where: object) -> LayerCost:
        """Recompute only adds to a layer's passes."""
        own = Random(f"{self._seed}/{experts}")
        again = 2.0 if recompute is Recompute.FULL else 0.0
        sharded = own.uniform(0, 1) if experts.dp_type is DataParallel.ZERO3 else 0.0
        passes = Random(f"{self._seed}/{experts[:2]}")
        terms = Terms(
            States(own.uniform(0, 200)),
            ByKind(PassTerms(passes.uniform(0, 4) + sharded), PassTerms(passes.uniform(0, 8), again)),
            optimizer_ms=own.random(),
        )
        return LayerCost.of(terms, own.uniform(0, 100) / (1 + again), Workspace(own.uniform(0, 50)))


def problem(seed: int) -> tuple[CostModel, SearchOptions]:
    draw = Random(seed)
    options = SearchOptions.from_mapping(
        {
            "gap": 0,
            "num_nodes": 1,
            "num_gpus_per_node": draw.choice((2, 4, 6)),
            "memory_constraint": draw.choice((0.3, 0.6, 24)),
            "context_mib": 0,
            "settle_bsz": 12,
            "settle_chunk": draw.choice((1, 2)),
            "seq_length": 64,
            "disable_vtp": True,
            "disable_tp": draw.random() < 0.5,
            "disable_ckpt": draw.random() < 0.5,
            "disable_etp": draw.random() < 0.3,
            "max_ep_deg": draw.choice((None, 2, 3)),
            "max_pp_deg": draw.choice((1, 2)),
            "pipeline_type": "pipedream_flush",
            "fine_grained_mode": draw.random() < 0.7,
        }
    )
    cost = derive(
        SMALL, load_data_sheet("h100-80gb"), 1, options.num_gpus_per_node, options.assumptions, options.cost_options
    )
    if seed % 2:
        cost._expert_half = RandomHalves(seed)  # type: ignore[method-assign,assignment]
    return cost, options


def least_time_s(cost: CostModel, options: SearchOptions) -> float:
    """The least step of all plans, and whether the bound by compute of each family is one."""
    of_family: dict[PlanFamily, float] = {}
    for one in every_plan([SMALL], cost, options):
        family = PlanFamily.of(one.plan)
        of_family[family] = min(one.time_s, of_family.get(family, inf))
    space = Space(SMALL, cost.assumed, options)
    for family, least_s in of_family.items():
        strategies = Strategies([space.layers(family)], [])
        assert compute_bound_ms(family, strategies, cost) <= least_s * 1000 * (1 + 1e-9)
    return min(of_family.values(), default=inf)


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 60))])
def test_the_search_finds_what_enumeration_finds(seed):
    cost, options = problem(seed)
    least = least_time_s(cost, options)
    found = search(SMALL, cost, options.model_copy(update={"simplest_within": 0.0}))
    if least == inf:
        assert found.best is None
    else:
        assert found.best and found.best.time_s == pytest.approx(least, rel=1e-9)
        assert found.lower_bound_s == pytest.approx(least, rel=1e-9)


def test_what_the_experts_of_a_layer_take():
    """By hand, of Qwen3-30B-A3B: 68 KiB a token are kept of experts, for any ep; weights are split by ep and tp."""
    model = load_model("qwen3-30b-a3b")
    assumed = Assumptions(True, Precision.BF16, True, 4096, True, True)

    def cost_of(
        experts: Experts, recompute: Recompute = Recompute.NONE, pipeline: int = 1, **options: float
    ) -> LayerCost:
        chosen = SearchOptions.from_mapping({"gap": 0} | options).cost_options
        cost = derive(model, load_data_sheet("h100-80gb"), 2, 8, assumed, chosen)
        return cost.expert_cost(experts, recompute, StageSetting(16, 16, 4, pipeline))

    even = {"moe_imbalance": 1, "moe_imbalance_bound": 1}
    whole, split = cost_of(Experts(1, 1, DataParallel.DDP)), cost_of(Experts(8, 1, DataParallel.DDP), **even)
    assert whole.activation_mib == split.activation_mib == 68 * 4096 / 1024
    weights = 128 * 3 * 2048 * 768
    assert split.terms.states.parameters_mib == weights / 8 * 2 / 2**20
    assert cost_of(Experts(4, 2, DataParallel.DDP), **even).states_mib == split.states_mib
    # A bound of twice the rows: twice the activations, while the expected ones stay.
    uneven = cost_of(Experts(8, 1, DataParallel.DDP), moe_imbalance=1, moe_imbalance_bound=2)
    assert uneven.activation_mib == 2 * split.activation_mib and uneven.passes_ms.forward == split.passes_ms.forward
    assert uneven.memory and uneven.memory.activation_mib == split.activation_mib
    assert cost_of(Experts(1, 1, DataParallel.DDP), moe_imbalance=2) == whole  # all experts: its own rows
    # In a pipeline each of the 16 experts has half a tile of 64 rows in vain, of 4,096 x 8 rows in all.
    padded = cost_of(Experts(8, 1, DataParallel.DDP), pipeline=2, **even)
    assert padded.activation_mib == split.activation_mib * (1 + 16 * 64 / (4096 * 8))
    again = cost_of(Experts(8, 1, DataParallel.DDP), Recompute.FULL, **even)
    assert (
        again.activation_mib == 0
        and again.passes_ms.backward > split.passes_ms.backward + 0.9 * split.passes_ms.forward
    )
    one_by_one = cost_of(Experts(1, 1, DataParallel.DDP), experts_one_by_one=True)
    assert one_by_one.passes_ms.forward > 3 * whole.passes_ms.forward


def test_an_expert_half_changes_no_dense_price():
    """A layer costs its dense half and its experts'; the dense half does not see ep."""
    cost, _ = problem(0)
    stage = StageSetting(cost.world_size, 12, 1, 1)
    for ep, etp in ((1, 1), (2, 1), (1, 2)):
        layer = LayerStrategy(ep=ep, etp=etp)
        both = cost.layer_cost(layer, stage)
        own = cost.expert_cost(layer.experts, layer.recompute, stage)
        assert both.passes_ms.forward - own.passes_ms.forward == pytest.approx(
            cost.layer_cost(LayerStrategy(), stage).passes_ms.forward
            - cost.expert_cost(LayerStrategy().experts, Recompute.NONE, stage).passes_ms.forward
        )
