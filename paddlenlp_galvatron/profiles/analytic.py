"""Profiles without a device, from the model's shape and a data sheet: for planned clusters.

Compute: matrix products at their share of the peak, everything else at its share of the memory bandwidth (each kept
number is written and read once; gathered tokens of a tp group: collectives write them, products read them). Memory: the
tensors that PaddleNLP's Llama and Qwen2 layers keep for backward under this project's runtime, counted in numbers a
token; measured layer by layer on CPU, where the count is exact. Fused kernels for GPUs keep less, as follows from the
reads of their backward (Paddle 3.3.1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import inf
from typing import NamedTuple

from ..base import FP32_BYTES, MIB, UserError
from ..model import Fused, ModelShape, Recompute, kinds_of, measured_fingerprint
from ..model.layer import APART, MODULES, Kept
from ..plan.precision import Precision, Products
from .computation import (
    EMBEDDING,
    HEAD,
    ComputationProfile,
    ExpertPass,
    ExpertTimes,
    PassKey,
    PassTimes,
    Shape,
    layer_part,
)
from .data_sheet import DataSheet
from .files import Meta
from .memory import STATE_BYTES, LayerMemory, MemoryProfile, Role, Variant, VocabMemory, VocabVariant

BATCHES = (1, 8)  # two, which every time mode needs
DEGREES = (1, 2, 4, 8, 16)
# Calls into Paddle of a layer's forward pass with plain kernels and with fused ones, and what a recomputed layer's has
# more: tests/runtime/test_python_per_layer.py.
LAYER_CALLS, FUSED_CALLS, CHECKPOINT_CALLS = 75, 56, 14
# A flash kernel gives each multiprocessor blocks of 128 rows (tokens) of a head, and the last blocks end at different
# times: two for each of 132. Measured on one H100 80GB, PyTorch 2.11, CUDA 13, forward and backward of FlashAttention-2
# with 32 heads: 230 TFLOP/s at 4,096 tokens, 320 at 16,384, 325 at 32,768.

LAST_ROWS = round(2.5 * 128 * 132)
ON_GPUS = Fused.ATTENTION | Fused.ROPE | Fused.NORMS  # training's defaults


# Experts. A grouped kernel reads the weights of every expert once and multiplies each row with those of one. Experts
# that run one by one take the sum of their products, or the host's calls if these take longer.
GRADIENT_BYTES = 10  # a weight's gradient in 16 bits is read, and added to a sum in fp32
PRODUCTS = 3  # an expert's gate, up and down
# Calls of forward after the host has read the row counts, which it cannot launch ahead.
CALLS_BEHIND_READ = 10
# A grouped product's time over that of a dense one as large, or of reading its weights where that is more:
# measured on one H100 80GB, PyTorch 2.11, CUDA 13, of 8 to 64 experts of 2,048 x 768 to 7,168 x 2,048 with 32 to 2,048
# rows each, within 12 %. Below 230 rows an expert it waits for weights.
GROUPED_START_US = 25
WASTED_ROWS = 64  # per expert: on average half a tile of 128 rows, as rows seldom fill the last tile
COPIES = 3  # copies of each row: into the order of ranks, into that of experts, and back
# FP8 copies of a product's input, by rows and by columns: Hopper's FP8 products need operands in one layout, and
# MXFP8's scales depend on the direction (Transformer Engine, user guide, "Using FP8 and FP4").
QUANTISED_COPIES = 2


class ExpertKernels(NamedTuple):
    """Properties of experts' kernels. Calls into Paddle are of one pass; backward has twice the kernels but no Python
    calls."""

    routing: int = 40  # calls for scores, their order and the exchanges: runtime/experts.py
    expert: int = 0  # calls for each of the rank's experts, if experts run one by one
    once: bool = False  # a token is sent once to each rank, or node, with any of its experts, as in DeepEP
    copies: int = 0  # additional copies of each row, kept for backward


GROUPED = ExpertKernels()
ONE_BY_ONE = ExpertKernels(expert=6)  # for each of three products: selecting rows, and the product


class Speed(NamedTuple):
    """Work of a device per millisecond, and its waits."""

    flops: float  # FLOP/ms of matrix products
    layer_flops: float  # the same for products with the weights of layers
    attention_flops: float  # FLOP/ms of flash attention
    bytes: float  # bytes/ms to and from memory
    quantise_ms: float  # to quantize an element that an FP8 product reads; 0: no FP8
    product_start_us: float
    call_us: float  # the host's time to start a kernel

    @classmethod
    def of(cls, sheet: DataSheet, precision: Precision, products: Products | None = None) -> Speed:
        """FP8 products reach the same share of their peak as others. Raises UserError if the chip has no FP8."""
        peak = sheet.matmul_fp32 if precision is Precision.FP32 else sheet.matmul_16bit
        of_layers = sheet.matmul_8bit if products else peak
        if of_layers is None:
            raise UserError(f"products: {sheet.device} has no FP8: {sheet.name} states no matmul_8bit; leave it out")
        return cls(
            peak.value * sheet.matmul_efficiency.value * 1e9,
            of_layers.value * sheet.matmul_efficiency.value * 1e9,
            peak.value * sheet.attention_efficiency.value * 1e9,
            (speed := sheet.memory_bandwidth.value * sheet.memory_efficiency.value * 1e6),
            (precision.bytes + QUANTISED_COPIES) / speed if products else 0.0,
            sheet.product_start.value,
            sheet.launch.value,
        )


@dataclass(frozen=True)
class _Passes:
    """Times of passes of a model's parts on one device."""

    speed: Speed
    precision: Precision
    fused: Fused
    kept_bytes: Callable[[int, int], float] | None
    sequence_parallel: bool

    @property
    def flash(self) -> bool:
        return Fused.ATTENTION in self.fused

    def times(
        self, tokens: int, kept: float, weights: int = 0, products: int = 0, flops: float = inf, pairs: float = 0.0
    ) -> PassTimes:
        """Times of `products` matrix products with `weights` weights at `flops` per ms, of attention's operations per
        token, and of memory traffic for the kept bytes per token. Backward adds its gradients to earlier ones."""
        product = 2 * weights * tokens / flops + products * self.speed.product_start_us / 1e3
        core = pairs * tokens / (self.speed.attention_flops if self.flash else self.speed.flops)
        traffic = 2 * kept * tokens / self.speed.bytes
        summed = 0.0 if self.kept_bytes else weights * GRADIENT_BYTES / self.speed.bytes
        forward = product + core + traffic
        return PassTimes(forward, 2 * (product + traffic) + (2.5 if self.flash else 2) * core + summed, forward)

    def of_layer(self, kind: ModelShape, tokens: int, seq: int, tp: int) -> PassTimes:
        matrices = [weight for weight in kind.block.weights if weight.sharded]
        core = kind.core_flops(seq, self.flash) / tp
        if self.flash:
            core *= 1 + 2 * LAST_ROWS / (tokens * kind.block.heads / tp + LAST_ROWS)
        kept = self.kept_bytes(seq, tp) if self.kept_bytes else self._kept(kind, seq, tp)
        weights = kind.layer_parameters // tp
        if not self.sequence_parallel:  # every rank projects all tokens to latents
            weights += sum(weight.numbers for weight in matrices if weight.axis is None) * (tp - 1) // tp
        speed = self.speed
        times = self.times(tokens, kept, weights, len(matrices), speed.layer_flops, core)  # its start is not split
        ends = (tokens * end.on(tp, self.sequence_parallel) for end in kind.block.product_ends)
        read_ms, written_ms = (numbers * speed.quantise_ms for numbers in ends)
        shares = recompute_shares(kind, seq, self.precision, self.fused, speed.layer_flops / speed.bytes)
        forward, measured = times.forward_ms + read_ms, {member: shares[member] for member in APART}
        return PassTimes(forward, times.backward_ms + written_ms, forward, measured)

    def _kept(self, kind: ModelShape, seq: int, tp: int) -> float:
        all_kept = sum(layer_numbers_per_token(kind, seq, 1, True, self.fused))
        block = kind.block.kept(self.fused)
        read = 2 * kind.hidden_size  # outputs of norms: measured products include them
        whole = 0 if self.sequence_parallel else block.tokens - read + block.scalars
        return self.precision.bytes * (whole + (all_kept - whole) / tp)

    def all(self, kinds: Sequence[ModelShape], lengths: Sequence[int]) -> dict[PassKey, PassTimes]:
        """The times of all parts, by batch, length and degree."""
        first, last = kinds[0], kinds[-1]
        measured: dict[PassKey, PassTimes] = {}
        for length, batch in product(lengths, BATCHES):
            for (number, kind), tp in product(enumerate(kinds), DEGREES):
                seq = kind.seq_length or length
                key = PassKey(layer_part(number), batch, seq, tp)
                measured[key] = self.of_layer(kind, batch * seq, seq, tp)
            seq = first.seq_length or length
            embedded = self.times(batch * seq, first.hidden_size * self.precision.bytes)
            measured[PassKey(EMBEDDING, batch, seq)] = embedded
            seq, width, words = last.seq_length or length, last.hidden_size, last.vocab_size
            times = self.times(batch * seq, 1.5 * words * FP32_BYTES, width * words, 1, self.speed.flops)
            measured[PassKey(HEAD, batch, seq)] = times
        return measured


def analytic_computation(
    model: ModelShape | Sequence[ModelShape],
    sheet: DataSheet,
    precision: Precision,
    lengths: Sequence[int],
    fused: Fused = ON_GPUS,
    kept_bytes: Callable[[int, int], float] | None = None,
    kernels: ExpertKernels = GROUPED,
    sequence_parallel: bool = True,
    products: Products | None = None,
) -> ComputationProfile:
    """Compute times of the model on one such device, at these sequence lengths, or those of the layer types.

    `kept_bytes`: activations a token and rank of a layer of another program, by sequence length and tp degree.
    `kernels`: of experts. `sequence_parallel`: Megatron's, without which every rank of a tp group has whole tokens.
    """
    kinds, speed = kinds_of(model), Speed.of(sheet, precision, products)
    measured = _Passes(speed, precision, fused, kept_bytes, sequence_parallel).all(kinds, lengths)

    def per_sample(module: str) -> dict[Shape, float]:
        whole = {key: times for key, times in measured.items() if key.part == module and key.tp == 1}
        return {Shape(key.batch, key.seq): times.forward_ms / key.batch for key, times in whole.items()}

    embedding, routed = per_sample(EMBEDDING), next((kind for kind in kinds if kind.experts), kinds[0])
    calls = FUSED_CALLS if Fused.NORMS in fused else LAYER_CALLS
    launch_ms, checkpoint_ms = (count * speed.call_us / 1000 for count in (calls, CHECKPOINT_CALLS))
    # AdamW reads gradient, master weight and moments and writes the last three and the weight.
    optimizer_bytes = 7 * FP32_BYTES + precision.bytes
    return ComputationProfile(
        precision.value,
        kinds[0].hidden_size,
        kinds[0].heads,
        {number: per_sample(layer_part(number)) for number in range(len(kinds))},
        {at: embedding[at] + ms for at, ms in per_sample(HEAD).items() if at in embedding},
        measured,
        experts=analytic_experts(routed, speed, precision, kernels),
        # Backward has twice the kernels but no Python calls.
        launch=PassTimes(launch_ms, launch_ms, launch_ms + checkpoint_ms),
        optimizer_ms_per_million=1e6 * optimizer_bytes / speed.bytes,
        meta=Meta.derived(sheet, model=measured_fingerprint(kinds), dtype=precision.value),
    )


def analytic_experts(
    model: ModelShape, speed: Speed, precision: Precision, kernels: ExpertKernels = GROUPED
) -> Mapping[int, ExpertTimes]:
    """Times by degree of tensor parallelism inside experts, on a device of this speed."""
    if not model.experts:
        return {}
    call_ms, start_ms = speed.call_us / 1e3, speed.product_start_us / 1e3
    weights, [experts] = model.routed.parameters // model.experts, model.routed.sublayers
    grouped = not kernels.expert
    alone_ms = 0.0 if grouped else PRODUCTS * start_ms
    start_ms = GROUPED_START_US / 1e3 if grouped else start_ms
    host = ExpertPass(kernels.routing * call_ms, kernels.expert * call_ms)

    def at(degree: int) -> ExpertTimes:
        rank_weights = weights / degree
        copied = (COPIES - kernels.once) * model.hidden_size
        numbers = 2 * (experts.kept.tokens + experts.kept.split / degree + copied)
        product_ms = 2 * rank_weights / speed.layer_flops  # time of a row
        row_ms = product_ms + numbers * precision.bytes / speed.bytes
        read, written = (ends.on(degree, False) for ends in model.routed.product_ends)
        start = CALLS_BEHIND_READ * call_ms + PRODUCTS * start_ms
        fixed_ms = alone_ms + (WASTED_ROWS * product_ms if grouped else 0.0)
        least_ms = alone_ms + rank_weights * (1 if speed.quantise_ms else precision.bytes) / speed.bytes
        summed_ms = rank_weights * GRADIENT_BYTES / speed.bytes
        forward = ExpertPass(start, fixed_ms, row_ms + read * speed.quantise_ms, least_ms)
        back_ms = 2 * row_ms + written * speed.quantise_ms
        backward = 2 * PRODUCTS * start_ms, 2 * fixed_ms + summed_ms, back_ms, 2 * least_ms + summed_ms
        return ExpertTimes(forward, ExpertPass(*backward), host)

    return {degree: at(degree) for degree in DEGREES if model.expert_size % degree == 0}


def analytic_memory(
    model: ModelShape | Sequence[ModelShape],
    precision: Precision,
    lengths: Sequence[int],
    fused: Fused = ON_GPUS,
    in_place: bool = True,
    products: Products | None = None,
) -> MemoryProfile:
    """Memory of the model's parts at these sequence lengths, or those of the layer types. `in_place`: losses use the
    logits' memory; else logits, probabilities and their gradient exist side by side in fp32."""
    layers: dict[Variant, dict[int, LayerMemory]] = {}
    vocab: dict[VocabVariant, dict[int, VocabMemory]] = {}
    kinds = kinds_of(model)
    first, last = kinds[0], kinds[-1]
    masks: dict[int, float] = {}
    for sequence_parallel, length in product((True, False), lengths):
        for number, kind in enumerate(kinds):
            seq = kind.seq_length or length
            layer_memory = _layer_memory(kind, precision, seq, sequence_parallel, fused, products)
            layers.setdefault(Variant(number, sequence_parallel), {})[seq] = layer_memory
            masks[seq] = 0.0 if Fused.ATTENTION in fused else seq * seq * precision.bytes / MIB
        ends: tuple[tuple[Role, ModelShape], ...] = (("only", last), ("first", first), ("last", last))
        for role, end in ends:
            seq = end.seq_length or length
            of_role = _vocab_memory(first, last, role, precision, length, sequence_parallel, in_place)
            vocab.setdefault(VocabVariant(role, sequence_parallel), {})[seq] = of_role
    meta = Meta.derived(None, model=measured_fingerprint(kinds), dtype=precision.value)
    return MemoryProfile(precision.value, first.hidden_size, first.heads, layers, vocab, masks, meta=meta)


def _layer_memory(
    kind: ModelShape, precision: Precision, seq: int, sequence_parallel: bool, fused: Fused, products: Products | None
) -> LayerMemory:
    hidden, token_mib = kind.hidden_size, precision.bytes * seq / MIB
    kept = {tp: layer_numbers_per_token(kind, seq, tp, sequence_parallel, fused) for tp in DEGREES}
    spared = kind.block.spared_bytes(precision.bytes) if products else Kept()
    # Backward's peaks: inside the MLP, inside attention, and with Megatron-SP at products of gathered tokens: the
    # tokens, their gradient, and a product's share of it.
    working = max(3 * kind.mlp_size + 2 * hidden, 2 * hidden + 5 * max(kind.q_width, kind.context_width))
    return LayerMemory(
        parameter_mib=kind.layer_parameters * FP32_BYTES / MIB,
        activation_mib={
            tp: numbers * token_mib + (scalars * FP32_BYTES - spared.on(tp, sequence_parallel)) * seq / MIB
            for tp, (numbers, scalars) in kept.items()
        },
        checkpoint_mib=hidden * token_mib,
        working_mib={tp: max(working / tp, 3 * hidden * (sequence_parallel and tp > 1)) * token_mib for tp in DEGREES},
    )


def _vocab_memory(
    first: ModelShape,
    last: ModelShape,
    role: Role,
    precision: Precision,
    seq: int,
    sequence_parallel: bool,
    in_place: bool,
) -> VocabMemory:
    """Embedding of the first layer type, LM head of the last one, or both. `seq`: sequence length of types without
    their own."""
    head, tables = role != "first", first.embedding.parameters if role == "first" else last.embedding.parameters
    if role == "only" and not first.tied_embeddings:
        tables += first.embedding.parameters
    end = last if head else first
    length, hidden, number = end.seq_length or seq, end.hidden_size, precision.bytes
    states, activation, kept = {}, {}, {}
    for tp in DEGREES:
        states[tp] = STATE_BYTES * (tables / tp + head * hidden) / MIB
        words, rank_hidden = last.vocab_size / tp, hidden / (tp if sequence_parallel else 1)
        # Exponentials overwrite fp32 logits, and the gradient overwrites exponentials; in addition there are logits or
        # gradient in 16 bits, then the hidden states' gradient.
        kept_bytes = FP32_BYTES * words + 3 * rank_hidden * number if head else rank_hidden * number
        logits_16bit = words if number < FP32_BYTES else 0
        more_bytes = (logits_16bit + hidden) * number if in_place else 2 * words * FP32_BYTES
        kept[tp] = kept_bytes * length / MIB
        activation[tp] = (kept_bytes + head * more_bytes) * length / MIB
    return VocabMemory(states, activation, kept)


def layer_numbers_per_token(
    model: ModelShape, seq: int, tp: int, sequence_parallel: bool, fused: Fused
) -> tuple[float, float]:
    """Saved activations of one layer, in (numbers, fp32 scalars) a token of the tp group.

    Those of its sublayers, and attention's probabilities (heads x S), or with flash attention one sum per head. Without
    Megatron-SP tokens between split projections stay whole on every rank of the tp group. With it all is split.
    """
    return _on_a_rank(model.block.kept(fused), model.block.heads, seq, tp, sequence_parallel, fused)


def recompute_saving_per_token(
    model: ModelShape, seq: int, tp: int, sequence_parallel: bool, fused: Fused, recompute: Recompute
) -> tuple[float, float]:
    """Activations that recompute of some parts frees, in the same units."""
    saving = sum((step.spared for step in model.block.again(recompute, fused)), Kept())
    heads = model.block.heads if Recompute.ATTENTION in recompute else 0
    return _on_a_rank(saving, heads, seq, tp, sequence_parallel, fused)


@lru_cache(maxsize=1024)  # called for the price of every strategy
def recompute_shares(
    model: ModelShape, seq: int, precision: Precision, fused: Fused, flops_per_byte: float
) -> dict[Recompute, float]:
    """Shares of a layer's forward that its parts take, by matrix products and kept elements, whose work a tp group
    shares; `flops_per_byte`: operations of a device in the time of moving a byte."""

    def work(flops: float, numbers: tuple[float, float]) -> float:
        return flops + 2 * precision.bytes * sum(numbers) * flops_per_byte

    where = (model, seq, 1, True, fused)
    core = model.core_flops(seq, Fused.ATTENTION in fused)
    whole = work(2 * model.layer_parameters + core, layer_numbers_per_token(*where))
    shares = {}
    for member in (*APART, *MODULES):
        products = sum(step.flops for step in model.block.again(member, fused))
        flops = products + (core if Recompute.ATTENTION in member else 0)
        shares[member] = work(flops, recompute_saving_per_token(*where, member)) / whole
    return shares


def _on_a_rank(kept: Kept, heads: int, seq: int, tp: int, sequence_parallel: bool, fused: Fused) -> tuple[float, float]:
    probabilities, sums = (0, heads) if Fused.ATTENTION in fused else (heads * seq, 0)
    scalars = kept.scalars / (tp if sequence_parallel else 1) + sums / tp
    return kept.on(tp, sequence_parallel) + probabilities / tp, scalars
