"""The branches of a search: every family of plans that the options leave, with its strategies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import product
from typing import TYPE_CHECKING

from ..base.errors import UserError
from ..cost_model import CostModel
from ..plan import LayerStrategy, Plan, Strategy, VocabStrategy
from ..plan.layout import TokenLayout, token_layout
from .options import SearchOptions
from .space import MOST_RUNS, LayerRun, PlanFamily, Space, Strategies, families, interleaved_families, runs_of, suited

if TYPE_CHECKING:
    from .even import EvenPlans

# Limits of the search space: about one minute of pricing and 100 MB.
MOST_FAMILIES, MOST_PRICES = 50_000, 1_000_000
# Dense layers that are priced with the embedding, and limit of their mixed strategies; beyond it all share one.
MOST_IN_FRONT, MOST_PREFIXES = 4, 64
MOST_ENDS = 2000  # limit of combinations of vocabulary, dense prefix and MTP that the core gets


class Branches:
    """The families of a model on a cluster. Raises UserError for a model with too many runs of layers."""

    def __init__(self, cost: CostModel, options: SearchOptions):
        self._cost, self._options = cost, options
        self.runs = runs_of(cost.layer_types)
        if len(self.runs) > MOST_RUNS:
            raise UserError(
                f"model_size: layers of different kinds of {cost.given[0].name} follow each other in {len(self.runs)} "
                f"runs without a period, of which at most {MOST_RUNS} are searched; "
                "write the plan yourself: galvatron plan uniform"
            )
        front, *behind = self.runs
        dense = len(cost.given) == 1 and behind and not any(cost.models[kind].experts for kind in front.types)
        dense = dense and any(cost.models[kind].experts for kind in behind[0].types)
        self._in_front = front.units if dense and len(front.types) == 1 and front.units <= MOST_IN_FRONT else 0
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
        ]  # one entry a layer type

    def strategies(self) -> dict[PlanFamily, list[Strategies]]:
        """The strategies of every family; none if its stages cannot divide the layers. Raises UserError if there are
        too many."""
        chosen: dict[PlanFamily, list[Strategies]] = {}
        # By ranks of a stage, samples of a micro-batch, and whether a step has several.
        alike: dict[tuple[int, int, bool], list[Strategies]] = {}
        total, layer_types = 0, self._cost.layer_types
        asked = self._options, self._cost.world_size, len(layer_types)
        for family in (*families(*asked), *interleaved_families(*asked)):
            where = family.stage_size, family.micro_batch, family.micro_batches > 1
            if self.even and not self.even.has(family):
                chosen[family] = []
                continue
            if where not in alike:
                alike[where] = self._strategies(family)
            chosen[family] = [item for item in alike[where] if self.even or item.can_divide(family, layer_types)]
            total += sum(len(layer) for strategies in chosen[family] for layer in strategies.layers)
            if len(chosen) > MOST_FAMILIES or total > MOST_PRICES:
                raise UserError(
                    f"min_bsz, max_bsz, bsz_scale: more than {MOST_FAMILIES} families of plans (batches by "
                    f"micro-batches by stages by schedules), or {MOST_PRICES} strategies in them; take a wider step, "
                    "or give settle_chunk, pipeline_type, max_pp_deg or max_tp_deg"
                )
        return chosen

    def _strategies(self, family: PlanFamily) -> list[Strategies]:
        """Strategies of each run of layers, and of a vocabulary that suits the first and the last run."""
        of_types = [space.layers(family) for space in self._spaces]
        if self.even:
            return self.even.spaces(of_types, self._spaces[0].vocabularies(family), family)
        others = set(self._spaces[0].vocabularies(family))
        vocabularies = [vocab for vocab in self._spaces[-1].vocabularies(family) if replace(vocab, pieces=1) in others]
        if self._options.one_strategy:
            mixture = next((number for number, item in enumerate(self._cost.models) if item.experts), 0)
            return [
                made
                for layer in of_types[mixture]
                if vocabularies and all(item in kind for item, kind in zip(self._alike(layer), of_types, strict=True))
                for made in self._divided([[item] for item in self._alike(layer)], vocabularies, family)
            ]
        return self._divided(of_types, vocabularies, family) if all(of_types) and vocabularies else []

    def _alike(self, layer: LayerStrategy) -> list[LayerStrategy]:
        """One strategy as each layer type has it."""
        return [suited(layer, model) for model in self._cost.models]

    def _divided(
        self, of_types: Sequence[Sequence[LayerStrategy]], vocabularies: Sequence[VocabStrategy], family: PlanFamily
    ) -> list[Strategies]:
        """Strategies of the layers for the core. A few dense layers before MoE layers are priced with the embedding if
        the first stage also has MoE layers: the core is fastest with layers of one type, and interleaves only these."""
        runs = [self._of_unit(run, of_types) for run in self.runs]
        units = [[self._cost.models[kind] for kind in run.types] for run in self.runs]
        units = units if any(unit[1:] for unit in units) else []
        spaces = [Strategies(runs, vocabularies, units=units)] if all(runs) else []
        if family.stages == 1 or units or not spaces:
            return spaces
        if self._in_front:
            front, count = runs[0], self._in_front
            mixed = len(front) ** count <= MOST_PREFIXES
            prefixes = list(product(front, repeat=count)) if mixed else [(layer,) * count for layer in front]
            # In the second space the first stage has only dense layers.
            spaces = [Strategies(runs[1:], vocabularies, prefixes), Strategies(runs, vocabularies, most_first=count)]
        return [*spaces, *(self._ending_in_mtp(spaces[0], family) if self._cost.given[-1].mtp_layers else ())]

    def _ending_in_mtp(self, space: Strategies, family: PlanFamily) -> Iterator[Strategies]:
        """Strategies that count the MTP layer as part of the LM head. It has the head's token layout, since the two
        exchange tokens four times. Dense layers at the start also have this layout, so that few combinations remain."""
        *layers, of_mtp = space.layers

        def layouts(chain: Sequence[Strategy]) -> list[TokenLayout]:
            return [token_layout(each, family.stage_size, self._cost.assumed.sequence_parallel) for each in chain]

        for layout in dict.fromkeys(layouts(space.vocabularies)):
            vocabularies = [vocab for vocab in space.vocabularies if layouts([vocab]) == [layout]]
            prefixes = [prefix for prefix in space.prefixes if set(layouts(prefix)) <= {layout}]
            suffixes = [(layer,) for layer in of_mtp if layouts([layer]) == [layout]]
            if prefixes and suffixes:
                most = MOST_ENDS // (len(vocabularies) * len(prefixes))
                yield Strategies(layers, vocabularies, prefixes, suffixes[:most])

    def _of_unit(self, run: LayerRun, of_types: Sequence[Sequence[LayerStrategy]]) -> Sequence[LayerStrategy]:
        """Strategies that all layers of a unit can have."""
        if len(run.types) == 1:
            return of_types[run.types[0]]
        first = next((kind for kind in run.types if self._cost.models[kind].experts), run.types[0])
        by_kind = {kind: set(of_types[kind]) for kind in run.types}
        choices = by_kind.items()
        return [layer for layer in of_types[first] if all(self._alike(layer)[kind] in each for kind, each in choices)]
