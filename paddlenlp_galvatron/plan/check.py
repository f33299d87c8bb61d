"""Whether a plan can run: every rule once, each fault one line with field, layer and remedy."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from ..base.errors import UserError
from ..model import MODULES, ModelShape, Recompute
from .layout import chunks_of_a_sample, token_axes
from .mesh import Axis
from .strategy import DataParallel, Plan, Strategy, all_sharing, runs

T = TypeVar("T")

MOE_RECOMPUTE = (Recompute.NONE, Recompute.ATTENTION, Recompute.FULL, *MODULES)  # choices of layers with experts


def require_valid(plan: Plan, model: ModelShape | None = None) -> None:
    """Raise UserError with every fault of the plan, if it has any."""
    if faults := find_faults(plan, model):
        raise UserError(faults)


def searched_options(plan: Plan) -> dict[str, Any]:
    """The options of the search that found the plan, as far as its file has them."""
    options = (plan.metadata.get("searched_from") or {}).get("options")
    return options if isinstance(options, dict) else {}


def adapters_of(plan: Plan) -> int | None:
    """Rank of the adapters that the plan was searched for; 0: unknown; None: all weights."""
    options = searched_options(plan)
    rank = options.get("lora_rank")
    if options.get("task") == "lora" or (options.get("task") == "dpo" and rank):
        return rank if type(rank) is int else 0
    return None


def task_note(plan: Plan, rank: int | None) -> str:
    """A note if the plan was searched for other adapters, or none, than those of this rank (None: all weights)."""
    searched = adapters_of(plan)
    if rank is not None and searched is None and searched_options(plan):
        return (
            "was searched for all weights; one for adapters, which need less memory, may be faster: galvatron search "
            "--task lora"
        )
    if rank is not None and searched and searched < rank:
        return (
            f"was searched for adapters of rank {searched}; those of rank {rank} need more memory than it has counted"
        )
    return ""


def require_trainable(plan: Plan, task: str = "", adapts: bool = False) -> None:
    """Raise UserError if the plan has a feature that is planned only, or was searched for adapters, which need less
    memory, and this `task` does not train adapters (`adapts`)."""
    if products := plan.assumed.products:
        raise UserError(f"assumed.products: {products} is planned only; find one: galvatron search without --products")
    if task and adapters_of(plan) is not None and not adapts:
        raise UserError(
            f"galvatron.searched_from: the plan was searched for adapters, but {task} trains all weights; search "
            f"one: galvatron search --task {task}"
        )
    if modules := dict.fromkeys(layer.recompute.words for layer in plan.layers if layer.recompute in MODULES):
        raise UserError(
            f"recompute_enc: {', '.join(modules)} is PaddleFleet's, whose recipe galvatron plan to-paddlefleet writes; "
            "search a plan without it"
        )


def require_fits(plan: Plan, model: ModelShape | None) -> None:
    """Raise UserError with every fault of the plan and, if given, of its use for a model. All commands that take a plan
    and a model call this."""
    if faults := misfits(plan, model):
        raise UserError(faults)


def misfits(plan: Plan, model: ModelShape | None) -> list[str]:
    """All faults; only one if the plan was searched for another model."""
    searched = plan.metadata.get("searched_from") or {}
    if model is not None and searched.get("model_fingerprint", model.fingerprint) != model.fingerprint:
        return [
            f"galvatron.searched_from: the plan was searched for {searched.get('model', 'another model')}, whose shape "
            f"is not that of {model.name}; search a plan for this model"
        ]
    return find_faults(plan, model)


def find_faults(plan: Plan, model: ModelShape | None = None) -> list[str]:
    """Faults of the plan, and of its use for a model if given. Empty: it can run."""
    grid = list(_grid_faults(plan))
    if grid:
        return grid  # without a grid, further checks would repeat these faults
    faults = [*_expert_faults(plan), *_batch_faults(plan), *_dp_type_faults(plan), *_sharding_faults(plan)]
    faults += [*_sequence_faults(plan), *_offload_faults(plan)]
    if model is not None:
        faults += _model_faults(plan, model)
    return faults


def _grid_faults(plan: Plan) -> Iterator[str]:
    if plan.chunks < 1 or len(plan.stages) % plan.chunks:
        yield (
            f"virtual_pp_deg: {plan.chunks} chunks a stage do not divide the {len(plan.stages)} entries of "
            "pp_division; give one entry a chunk of every stage"
        )
        return
    pipeline = plan.pipeline
    for number, count in enumerate(plan.stages):
        if count < 1:
            chunk = f"chunk {number // pipeline} of stage" if plan.chunks > 1 else "stage"
            yield (
                f"pp_division: {chunk} {number % pipeline} has {count} layers; "
                f"give every {'chunk' if plan.chunks > 1 else 'stage'} at least one"
            )
    if plan.chunks > 1 and plan.schedule.of_chunks is None:
        yield (
            f"virtual_pp_deg: {plan.chunks} chunks a stage, but {plan.schedule} has one; "
            "set virtual_pp_deg to 1 or pipeline_type to pipedream_flush"
        )
    if plan.chunks > 1 and pipeline == 1:
        yield f"virtual_pp_deg: {plan.chunks} chunks of the only stage would be one; set it to 1 or raise pp_deg"
    if plan.world_size % pipeline:
        yield (
            f"pp_deg: {pipeline} stages do not divide {plan.world_size} ranks; "
            f"choose a divisor of {plan.world_size} or change world_size"
        )
        return
    size = plan.stage_size
    for layers, degree in _named_runs([layer.degree for layer in plan.layers]):
        if degree < 1 or size % degree:
            yield (
                f"tp_sizes_enc: degree {degree} of {layers} does not divide the {size} ranks of a stage; "
                f"choose a divisor of {size}"
            )
    if plan.vocab.degree < 1 or size % plan.vocab.degree:
        yield f"vtp: degree {plan.vocab.degree} does not divide the {size} ranks of a stage; choose a divisor of {size}"
    for fields, who, strategy in _parts(plan):
        alone_fits = strategy.degree > 0 and size % strategy.degree == 0
        for axis, degree in strategy.extra:
            if degree < 1 or (degree > 1 and alone_fits and size % strategy.ranks):
                yield (
                    f"{fields.format(axis)}: {degree} and degree {strategy.degree} of {who} does not divide the {size} "
                    "ranks of a stage; choose degrees whose product does"
                )


def _expert_faults(plan: Plan) -> Iterator[str]:
    size = plan.stage_size
    for layers, experts in _named_runs([layer.experts for layer in plan.layers]):
        if min(experts[:2]) < 1 or size % experts.ranks:
            yield (
                f"ep_sizes_enc: {experts.ep} with tp_of_ep_sizes_enc {experts.etp} of {layers} does not divide the "
                f"{size} ranks of a stage; choose degrees whose product does"
            )


def _batch_faults(plan: Plan) -> Iterator[str]:
    batch, chunks = plan.global_batch, plan.micro_batches
    if batch % chunks:
        yield f"chunks: {chunks} micro-batches do not divide global_bsz {batch}; choose a divisor of {batch}"
        return
    for layers, ranks in _named_runs([layer.ranks for layer in plan.layers]):
        dp = plan.stage_size // ranks
        if plan.micro_batch % dp:
            yield _batch_fault(plan, f"{layers} with degree {ranks}", dp)
    if plan.micro_batch % plan.dp(plan.vocab):
        yield _batch_fault(plan, f"the vocabulary layers with vtp {plan.vocab.degree}", plan.dp(plan.vocab))


def _batch_fault(plan: Plan, who: str, dp: int) -> str:
    multiple = plan.micro_batches * dp
    return (
        f"global_bsz: {plan.global_batch} samples in {plan.micro_batches} micro-batches do not split over the dp "
        f"degree {dp} of {who}; make global_bsz a multiple of {multiple} or change chunks or the degree"
    )


def _dp_type_faults(plan: Plan) -> Iterator[str]:
    expressible = {plan.default_dp_type, DataParallel.ZERO3}
    of_layers = {
        "dp_types_enc": [layer.dp_type for layer in plan.layers],
        "dp_types_of_ep_enc": [layer.experts.dp_type for layer in plan.layers],
    }
    for name, dp_types in of_layers.items():
        for layers, dp_type in _named_runs(dp_types):
            if dp_type not in expressible:
                yield (
                    f"{name}: {dp_type} of {layers} cannot be written to a file; "
                    f"choose default_dp_type ({plan.default_dp_type}) or zero3"
                )
    if plan.vocab.dp_type not in expressible:
        yield (
            f"embed_sdp: {plan.vocab.dp_type} is neither default_dp_type ({plan.default_dp_type}) nor zero3; choose "
            "one of these"
        )


def _sharding_faults(plan: Plan) -> Iterator[str]:
    size = plan.stage_size
    parts = [
        ("sharding_sizes_enc", layers, all_sharing(size, layer.tp), layer.sharding, layer.dp_type)
        for layers, layer in _named_runs(plan.layers)
    ]
    parts += [
        ("sharding_sizes_of_ep_enc", f"experts of {layers}", all_sharing(size, half.ranks), half.sharding, half.dp_type)
        for layers, half in _named_runs([layer.experts for layer in plan.layers])
    ]
    vocab = plan.vocab
    parts.append(("vsharding", "the vocabulary layers", all_sharing(size, vocab.tp), vocab.sharding, vocab.dp_type))
    for field, who, sharing, sharding, dp_type in parts:
        if sharding in (None, sharing):
            continue
        if dp_type is DataParallel.DDP:
            yield f"{field}: {sharding} for {who}, but ddp shards nothing; give {sharing}, or zero2 or zero3"
        elif sharding < 2 or sharing % sharding:
            yield (
                f"{field}: {sharding} for {who} is not a part of the {sharing} ranks that hold the same weights; "
                f"choose a divisor of {sharing} above 1"
            )


def _sequence_faults(plan: Plan) -> Iterator[str]:
    tokens = plan.assumed.seq_length
    if tokens is None:
        return
    for fields, who, strategy in _parts(plan):
        for axis, degree in strategy.extra:
            if tokens % (chunks := chunks_of_a_sample(axis, degree)):
                equal = "two equal pieces" if chunks > degree else "an equal piece"
                yield (
                    f"{fields.format(axis)}: a sequence length of {tokens} does not make {equal} for each of the "
                    f"{degree} ranks of {who}; choose a seq_length that is a multiple of {chunks}"
                )
    cuts = token_axes(plan.assumed.sequence_parallel)
    for fields, who, strategy in _parts(plan):
        # tokens of all ranks of the last axis together
        held = plan.micro_batch * tokens * strategy.degree // plan.stage_size
        if strategy.axes[-1][0] in cuts and held % strategy.degree:
            yield (
                f"{fields.format(Axis.TENSOR)}: {who}: {held} tokens of a micro-batch do not split over degree "
                f"{strategy.degree} (sequence parallel); choose a seq_length that is a multiple of {strategy.ranks}"
            )


def _offload_faults(plan: Plan) -> Iterator[str]:
    for layers, (percent, recompute) in _named_runs([(layer.offload, layer.recompute) for layer in plan.layers]):
        if percent and recompute not in (Recompute.NONE, Recompute.FULL):
            yield (
                f"offload_enc: {percent} of {layers} with recompute {recompute.words}; activations go to the host's "
                "memory where a layer recomputes nothing or all, so give 0, or none or full in recompute_enc"
            )


def _model_faults(plan: Plan, model: ModelShape) -> Iterator[str]:
    if len(plan.layers) != model.layers:
        yield (
            f"pp_division: the plan has {len(plan.layers)} layers but {model.name} has {model.layers}; "
            "search a plan for this model"
        )
    if plan.assumed.seq_length and plan.assumed.seq_length > model.max_position_embeddings:
        yield (
            f"galvatron.assumed.seq_length: {plan.assumed.seq_length} is beyond the {model.max_position_embeddings} "
            f"positions of {model.name}; shorten it, or give the model more positions"
        )
    kinds = [model.of(index) for index in range(model.layers)]
    degrees = [(layer.degree, layer.ulysses, layer.context) for layer in plan.layers]
    for layers, ((degree, ulysses, cp), kind) in _runs_of(degrees, kinds):
        if kind.linear and cp > 1:
            yield f"cp_sizes_enc: {cp} of {layers}: linear attention of {model.name} splits no sample; give 1"
        split = [sublayer for sublayer in kind.block.sublayers if sublayer.attends or not ulysses]
        for what, count, shared in (number for sublayer in split for number in sublayer.divided):
            if count % degree and not (shared and degree % count == 0):
                yield (
                    f"tp_sizes_enc: degree {degree} of {layers} does not divide the {count} {what} of "
                    f"{model.name}; choose a divisor of {count}"
                )
    for layers, (recompute, kind) in _runs_of([layer.recompute for layer in plan.layers], kinds):
        if recompute is Recompute.GATE_UP and not kind.experts:
            yield f"recompute_enc: {recompute.words} of {layers}: {model.name} has no experts there; choose another"
    yield from _faults_of_experts(plan, model, kinds)


OF_EXPERTS = (  # fields, and their values where a layer has no experts
    ("ep_sizes_enc", "1"),
    ("dp_types_of_ep_enc", "the value of dp_types_enc"),
    ("sharding_sizes_of_ep_enc", "the ranks that share its weights"),
)


def _faults_of_experts(plan: Plan, model: ModelShape, kinds: Sequence[ModelShape]) -> Iterator[str]:
    layouts = [(layer.experts.ranks > 1, layer.experts_dp_type, layer.experts_sharding) for layer in plan.layers]
    for layers, (values, kind) in _runs_of(layouts, kinds):
        entry = next((number for number, value in enumerate(values) if value), None)
        if not kind.experts and entry is not None:
            name, plain = OF_EXPERTS[entry]
            remedy = f" there; give {plain}" if model.experts else "; leave the field out"
            yield f"{name}: {layers}: {model.name} has no experts{remedy}"
    if not model.experts:
        return
    for layers, (experts, kind) in _runs_of([layer.experts for layer in plan.layers], kinds):
        if kind.experts and kind.experts % experts.ep:
            yield (
                f"ep_sizes_enc: degree {experts.ep} of {layers} does not divide the {kind.experts} experts of "
                f"{model.name}; choose a divisor of {kind.experts}"
            )
        if kind.expert_size % experts.etp:
            yield (
                f"tp_of_ep_sizes_enc: degree {experts.etp} of {layers} does not divide the {kind.expert_size} columns "
                f"of an expert of {model.name}; choose a divisor of {kind.expert_size}"
            )
    for layers, (recompute, kind) in _runs_of([layer.recompute for layer in plan.layers], kinds):
        if kind.experts and recompute not in MOE_RECOMPUTE:
            yield (
                f"recompute_enc: {recompute.words} of {layers}: layers with experts recompute nothing, attention or "
                "all; choose one of these"
            )
    tokens = plan.micro_batch * (plan.assumed.seq_length or 0)
    split = any(layer.tp > 1 for layer in plan.layers) and not plan.assumed.sequence_parallel
    if split and tokens % plan.stage_size:
        yield (
            f"ep_sizes_enc: {tokens} tokens of a micro-batch are not as many for each of the {plan.stage_size} ranks "
            "of a stage, as experts need them; choose another seq_length or batch"
        )


def _parts(plan: Plan) -> Iterator[tuple[str, str, Strategy]]:
    """Runs of equal layers and the vocabulary layers: (fields of their degrees by axis, name, strategy)."""
    yield from (("{}_sizes_enc", layers, layer) for layers, layer in _named_runs(plan.layers))
    yield "v{}", "the vocabulary layers", plan.vocab


def _runs_of(values: Sequence[T], kinds: Sequence[ModelShape]) -> Iterator[tuple[str, tuple[T, ModelShape]]]:
    """Runs of neighbouring layers with equal values and equal kinds."""
    yield from _named_runs(list(zip(values, kinds, strict=False)))


def _named_runs(values: Sequence[T]) -> Iterator[tuple[str, T]]:
    """Runs of equal neighbours: ("layer 3" or "layers 4-7", value)."""
    for layers, value in runs(values):
        yield (f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]}-{layers[-1]}"), value


def with_assumptions(plan: Plan, **assumptions: Any) -> Plan:
    """The plan with these assumptions where its file has none; None: a flag that was not given.

    Raises UserError for a flag that contradicts the file. The result is not yet checked.
    """
    flags = {name: value for name, value in assumptions.items() if value is not None}
    faults = [
        f"{name}: the plan was searched for {getattr(plan.assumed, name)} but {value} is given; "
        "leave the flag out or search a plan for it"
        for name, value in flags.items()
        if name in plan.stated and getattr(plan.assumed, name) != value
    ]
    if faults:
        raise UserError(faults)
    return replace(plan, assumed=replace(plan.assumed, **flags), stated=plan.stated | set(flags))


def with_defaults(plan: Plan, on_gpus: bool) -> Plan:
    """The plan with its unset fields as training sets them: on GPUs with fused kernels; 16-bit runs there use flash
    attention and sum gradients in fp32, as small contributions of many micro-batches would be lost."""
    default = on_gpus and plan.assumed.mixed_precision.mixed
    by_default = replace(
        plan.assumed,
        fp32_gradients=default,
        flash_attention=default,
        fused_rope=on_gpus,
        fused_rms_norm=on_gpus,
        fused_cross_entropy=False,  # the way its communicator is made has not run on GPUs
    )
    return replace(plan, assumed=plan.assumed.completed(by_default))
