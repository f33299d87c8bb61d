"""The branches of a search: every family of plans that the options leave, with its strategies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import product
from typing import TYPE_CHECKING

from ..base.errors import UserError
from ..cost_model import CostModel
from ..plan import LayerStrategy, Plan, VocabStrategy
from .options import SearchOptions
from .space import PlanFamily, Space, Strategies, families, interleaved_families, runs_of, without_experts

if TYPE_CHECKING:
    from .even import EvenPlans

# Limits of the search space: about one minute of pricing and 100 MB.
MOST_FAMILIES, MOST_PRICES = 50_000, 1_000_000
MOST_RUNS = 8  # of layers of one type, in the core
# Dense layers that are priced with the embedding, and their mixed strategies; with more of these, all have one.
MOST_IN_FRONT, MOST_PREFIXES = 4, 64


class Branches:
    """The families of a model on a cluster. Raises UserError for a model with too many runs of layers."""

    def __init__(self, cost: CostModel, options: SearchOptions):
        self._cost, self._options = cost, options
        self.runs = runs_of(cost.layer_types)
        if len(self.runs) > MOST_RUNS:
            raise UserError(
                f"model_size: in {cost.given[0].name} dense layers and layers with experts follow each other in "
                f"{len(self.runs)} runs, of which at most {MOST_RUNS} are searched; write the plan yourself: galvatron "
                "plan uniform"
            )
        dense = (
            len(cost.given) == 1 and len({run.layer_type for run in self.runs[:2]}) == 2 and not cost.models[0].experts
        )
        self._in_front = self.runs[0].layers if dense and self.runs[0].layers <= MOST_IN_FRONT else 0
        self.bare = Plan(
            world_size=cost.world_size,
            global_batch=1,
            micro_batches=1,
            stages=(),
            layers=(),
            default_dp_type=options.default_dp_type,
            assumed=cost.assumed,
            stated=frozenset(name for name, value in asdict(cost.assumed).items() if value is not None),
        )
        self.even: EvenPlans | None = None
        if options.trainer != "galvatron":
            from .even import EvenPlans

            self.even = EvenPlans(options.trainer, cost.given[0], cost, options.budget_mib, self.bare)
        self._spaces = [
            Space(model, replace(cost.assumed, seq_length=seq), options, cost, layer_type)
            for layer_type, (model, seq) in enumerate(zip(cost.models, cost.seqs, strict=True))
        ]  # of each layer type

    def strategies(self) -> dict[PlanFamily, list[Strategies]]:
        """The strategies of every family; none where the layers cannot be divided among its stages. Raises UserError
        where they are too many."""
        found: dict[PlanFamily, list[Strategies]] = {}
        # By ranks of a stage, samples of a micro-batch, and whether a step has several.
        alike: dict[tuple[int, int, bool], list[Strategies]] = {}
        total, layers = 0, len(self._cost.layer_types)
        asked = self._options, self._cost.world_size, layers
        for family in (*families(*asked), *interleaved_families(*asked)):
            where = family.stage_size, family.micro_batch, family.micro_batches > 1
            if where not in alike:
                alike[where] = self._strategies(family)
            found[family] = [
                one
                for one in alike[where]
                if (layers >= family.stages * family.chunks if self.even else one.can_divide(family, layers))
            ]
            total += sum(len(some) for strategies in found[family] for some in strategies.layers)
            if len(found) > MOST_FAMILIES or total > MOST_PRICES:
                raise UserError(
                    f"min_bsz, max_bsz, bsz_scale: more than {MOST_FAMILIES} families of plans (batches by "
                    f"micro-batches by stages by schedules), or {MOST_PRICES} strategies in them; take a wider step, "
                    "or give settle_chunk, pipeline_type, max_pp_deg or max_tp_deg"
                )
        return found

    def _strategies(self, family: PlanFamily) -> list[Strategies]:
        """Strategies of each run of layers, and of a vocabulary that suits the first and the last one."""
        of_types = [space.layers(family) for space in self._spaces]
        if self.even:
            return self.even.spaces(of_types, self._spaces[0].vocabularies(family), family)
        others = set(self._spaces[0].vocabularies(family))
        vocabularies = [vocab for vocab in self._spaces[-1].vocabularies(family) if replace(vocab, pieces=1) in others]
        if self._options.one_strategy:
            mixture = next((number for number, one in enumerate(self._cost.models) if one.experts), 0)
            return [
                made
                for layer in of_types[mixture]
                if vocabularies and all(one in some for one, some in zip(self._alike(layer), of_types, strict=True))
                for made in self._divided([[one] for one in self._alike(layer)], vocabularies, family)
            ]
        return self._divided(of_types, vocabularies, family) if all(of_types) and vocabularies else []

    def _alike(self, layer: LayerStrategy) -> list[LayerStrategy]:
        """One strategy as each layer type has it: without that of experts where there are none."""
        return [layer if model.experts else without_experts(layer) for model in self._cost.models]

    def _divided(
        self, of_types: Sequence[Sequence[LayerStrategy]], vocabularies: Sequence[VocabStrategy], family: PlanFamily
    ) -> list[Strategies]:
        """Strategies of the layers as the core sees them. A few dense layers in front of layers with experts are priced
        with the embedding where the first stage has some of the others, too: the core proves the optimum of layers of
        one type best, and takes chunks of these alone."""
        runs = [of_types[run.layer_type] for run in self.runs]
        if not self._in_front or family.stages == 1:
            return [Strategies(runs, vocabularies)]
        front, count = runs[0], self._in_front
        mixed = len(front) ** count <= MOST_PREFIXES
        prefixes = list(product(front, repeat=count)) if mixed else [(layer,) * count for layer in front]
        alone = Strategies(runs, vocabularies, most_first=count)  # the first stage has dense layers alone
        return [Strategies(runs[1:], vocabularies, prefixes), alone]
