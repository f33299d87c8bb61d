"""A cost model with random prices behind the real `predict`: a reference for the search, on any hardware at once."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from math import inf
from types import SimpleNamespace

from paddlenlp_galvatron.cost_model import CostModel, LayerCost, Workspace
from paddlenlp_galvatron.model import layer_types_of
from paddlenlp_galvatron.plan import DataParallel, ModelShape, Plan
from paddlenlp_galvatron.plan.layout import redistribution, token_layout
from paddlenlp_galvatron.plan.schedule import ByKind
from paddlenlp_galvatron.planner import Candidate, SearchOptions
from paddlenlp_galvatron.planner.space import Space, families, interleaved_families
from paddlenlp_galvatron.profiles.data_sheet import Device
from paddlenlp_galvatron.profiles.reserve import Reserve


def model_of(
    layers: int, hidden_size: int = 96, seq_length: int | None = None, dense_layers: tuple[int, ...] = (), mtp: int = 0
) -> ModelShape:
    """With `dense_layers` the others have experts; with `mtp` the last one is of it."""
    like = ModelShape("random", "llama", layers, hidden_size, 192, 12, 12, 100, 64, seq_length=seq_length)
    if not dense_layers:
        return like
    experts = {"experts": 2, "experts_per_token": 1, "expert_size": 12, "dense_layers": dense_layers}
    return replace(like, family="qwen3_moe", mtp_layers=mtp, **experts)  # type: ignore[arg-type]


class RandomCost(CostModel):
    """Prices drawn at random, the same ones for the same question."""

    crooked = False  # prices of switching that break the triangle inequality
    neighbours = False  # layers whose messages and weights take room next to the next one's backward

    def __init__(self, models: Sequence[ModelShape], options: SearchOptions, seed: int):
        self.given, self.models = tuple(models), tuple(kind for model in models for kind in model.kinds)
        cluster = {"num_nodes": options.num_nodes, "gpus_per_node": options.num_gpus_per_node}
        self.profiles = SimpleNamespace(**cluster, files=(), device=Device(), reserve=Reserve())  # type: ignore[assignment]
        self.assumed, self.options = options.assumptions, options.cost_options
        self.layer_types = layer_types_of(models)
        self.seqs = tuple(model.seq_length or options.seq_length for model in self.models)
        self.seed = seed
        for name in ("layer_cost", "vocab_cost", "middle_cost", "switch_cost", "boundary_cost"):
            setattr(self, name, cache(getattr(self, name)))

    def _draw(self, *question: object) -> LayerCost:
        reported = repr((self.seed, question))
        for later in (", sharding=None", ", experts_sharding=None", ", offload=0"):
            reported = reported.replace(later, "")  # chosen seeds draw the same when strategies get new fields
        draw = random.Random(reported).uniform
        numbers = draw(1, 3), draw(2, 6), draw(0, 9), draw(10, 200), draw(10, 200)
        workspace = Workspace(*(draw(0, 150) for _ in range(4 if self.neighbours else 1)))
        return LayerCost(ByKind(*numbers[:2]), *numbers[2:], workspace)

    def layer_cost(self, strategy, stage, layer_type=0):  # type: ignore[no-untyped-def]
        where = (strategy.axes, strategy.consecutive, stage.stage_size, stage.micro_batch, stage.pipeline)
        plain, whole = (self._draw(*key, layer_type) for key in ((where,), (where, strategy, stage.micro_batches > 1)))
        # ZeRO-3 and recompute only add to a layer's passes.
        forward, backward = plain.passes_ms
        gathered = whole.passes_ms.forward - 1 if strategy.dp_type is DataParallel.ZERO3 else 0.0
        again = whole.passes_ms.backward - 2 if strategy.recompute else 0.0
        return replace(whole, passes_ms=ByKind(forward + gathered, backward + gathered + again))

    def expert_cost(self, experts, recompute, stage, layer_type=0):  # type: ignore[no-untyped-def]
        """None beats another one: the search must try all."""
        size = 10 * experts.ep + experts.etp + (experts.dp_type is DataParallel.ZERO3) / 2
        return LayerCost(ByKind(size, 99.0 - size), 0.0, 0.0, 0.0, Workspace())

    def vocab_cost(self, vocab, stage, role):  # type: ignore[no-untyped-def]
        return self._draw(vocab, stage.stage_size, stage.micro_batch, stage.micro_batches > 1, stage.pipeline, role)

    def middle_cost(self, stage, later=False):  # type: ignore[no-untyped-def]
        drawn = self._draw("middle", stage.stage_size, stage.micro_batch)
        return replace(drawn, passes_ms=ByKind(0.0, 0.0), sync_ms=0.0)

    def switch_cost(self, before, after, stage, layer_type=0):  # type: ignore[no-untyped-def]
        stage_size, micro_batch = stage[:2]
        rate = random.Random(repr((self.seed, stage_size, micro_batch))).uniform(0, 2) * self._width(layer_type)
        sharded = self.assumed.sequence_parallel
        source, target = (token_layout(strategy, stage_size, sharded) for strategy in (before, after))
        tokens = 64 * stage_size * micro_batch
        there, back = (
            redistribution(*way, tokens, micro_batch).most_tokens / tokens
            for way in ((source, target), (target, source))
        )
        if self.crooked:
            rate *= random.Random(repr((self.seed, source, target, micro_batch))).uniform(0, 3)
        return ByKind(rate * there, rate * back)

    def boundary_cost(self, stage, layer_type=0):  # type: ignore[no-untyped-def]
        return random.Random(repr((self.seed, stage.micro_batch, stage.pipeline))).uniform(0, 1) * self._width(
            layer_type
        )

    def _shared_mib(self, plan: Plan, stage: int) -> float:
        return 0.0

    def _width(self, layer_type: int) -> float:
        """The tokens passed between layers of a type, in any unit."""
        return self.models[layer_type].hidden_size * self.seqs[layer_type] / (96 * 12)


def divisions(layers: int, stages: int) -> list[tuple[int, ...]]:
    """Every way to divide layers into stages."""
    if stages == 1:
        return [(layers,)]
    return [(n, *rest) for n in range(1, layers - stages + 2) for rest in divisions(layers - n, stages - 1)]


def best_by_enumeration(models: Sequence[ModelShape], cost: CostModel, options: SearchOptions) -> float:
    """Least seconds per sample over every plan of the space that fits."""
    return min((one.ms_per_sample / 1000 for one in every_plan(models, cost, options)), default=inf)


def every_plan(models: Sequence[ModelShape], cost: CostModel, options: SearchOptions) -> Iterator[Candidate]:
    """Every plan of the space that fits, each priced by `predict`."""
    spaces = [
        Space(m, replace(cost.assumed, seq_length=s), options) for m, s in zip(cost.models, cost.seqs, strict=True)
    ]
    kinds = cost.layer_types
    where = options, cost.world_size, len(kinds)
    for family in (*families(*where), *interleaved_families(*where)):
        layers = [space.layers(family) for space in spaces]
        vocabularies = [v for v in spaces[0].vocabularies(family) if v in spaces[-1].vocabularies(family)]
        pairs = product(product(*(layers[kind] for kind in kinds)), vocabularies)
        if options.one_strategy:
            mixture = max(range(len(layers)), key=lambda kind: cost.models[kind].experts)
            pairs = (  # type: ignore[assignment]
                (tuple(alike[kind] for kind in kinds), vocab)
                for layer, vocab in product(layers[mixture], vocabularies)
                for alike in [
                    [layer if m.experts else replace(layer, ep=1, etp=1, experts_dp_type=None) for m in cost.models]
                ]
                if all(layer in some for layer, some in zip(alike, layers, strict=True))
            )
        for (strategies, vocab), stages in product(pairs, divisions(len(kinds), family.stages * family.chunks)):
            plan = Plan(
                world_size=family.world_size,
                global_batch=family.global_batch,
                micro_batches=family.micro_batches,
                stages=stages,
                layers=strategies,
                vocab=vocab,
                schedule=family.schedule,
                chunks=family.chunks,
                default_dp_type=options.default_dp_type,
                assumed=cost.assumed,
            )
            prediction = cost.predict(plan)
            if max(stage.memory.total_mib for stage in prediction.stages) <= options.memory_constraint * 1024:
                yield Candidate(plan, prediction)
