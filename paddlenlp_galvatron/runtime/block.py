"""One decoder layer of PaddleNLP under its own strategy: its weights replaced by shards, with collectives.

Between layers the tokens of a micro-batch are flat, [T, H], and lie as `plan.layout` says. Attention's core alone wants
whole sequences: [B, S, …] with B·S tokens of the layer's dp share. `plan.comm_points` lists the collectives.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import paddle
from paddle import nn
from paddle.distributed.fleet.utils import recompute
from paddle.incubate.nn.functional import swiglu

from ..model.latents import Latents
from ..model.lora import adapted
from ..plan import LayerStrategy, Recompute
from ..plan.comm_points import CommPoint, repeated
from ..plan.layout import own_chunks
from ..plan.mesh import EXCHANGE, SAMPLE_AXES, Axis
from .attention import Chunks, Documents, OwnPositions, flash, hidden_rows, own_rows
from .experts import PRODUCTS, Memo, OwnExperts
from .grouped import Padding
from .groups import RankGroups
from .latents import LatentAttention
from .load import LayerLoad, Load
from .lora import LoRALinear, add_adapters
from .placement import Placement
from .precision import cast
from .products import read_together
from .recompute import RecomputedPart
from .setup import ModelSetup
from .trace import span
from .weights import ShardedParameter, compute_weights, shard_layer, stacked


class Block:
    """Calls one decoder layer on flat tokens: [T, H] -> [T, H]."""

    def __init__(self, setup: ModelSetup, here: RankGroups, index: int, load: Load):
        strategy, adapters = setup.plan.layers[index], setup.adapters
        self._placement = placement = Placement(setup, here, strategy)
        self.samples = placement.samples
        self._recompute = strategy.recompute
        self._shape = shape = setup.shape.of(index)
        context = placement.mesh.degree(Axis.CONTEXT)
        self._seq_length = setup.seq_length
        self._own_length = self._seq_length // context  # of the queries that attention has here
        place = placement.mesh.index(placement.local, Axis.CONTEXT)
        self._chunks = own_chunks(place, context, self._seq_length) if context > 1 else None
        with paddle.LazyGuard():  # whole weights are never made
            self._layer = setup.family.decoder_layer(shape, setup.config)
            if adapters:
                add_adapters(self._layer, [name.removesuffix(".weight") for name in shape.block.projections], adapters)
        kind = adapted(shape.block, adapters.rank) if adapters else shape.block
        prefix = f"{shape.traits.prefix}.layers.{index}."
        self._slots = shard_layer(self._layer, lambda name: placement.parameter(kind[name], prefix))
        self._memo: Memo = {}
        self._experts = None
        if shape.experts:
            own = LayerLoad(load, placement.own_samples(strategy), placement.group(*SAMPLE_AXES))
            self._experts = self._own_experts(strategy, prefix, own, load.padding)
        self.parameters: list[ShardedParameter] = [weight for _, _, weight in self._slots]
        for inner in self._layer.sublayers():
            if type(inner) is nn.Linear and inner.bias is None:
                inner.forward = partial(_product, inner)
        self._patch()

    def __call__(self, x: Any, mask: Any) -> Any:
        """`x` [T, H]; `mask` [1, 1, S, S] to add to attention scores, or None where attention is causal itself; or
        [B, S], where each key's document ends: attention stays within it."""
        again = self._recompute is Recompute.FULL and paddle.is_grad_enabled()
        memo: Memo = {}
        return recompute(self._run_or_recompute, x, mask, memo) if again else self._run(x, mask, memo)

    def share_positions(self, other: Block) -> None:
        """Use another layer's tables of positions, which are the same: of 4096 tokens each takes 4 MiB."""
        self._use_positions(other._positions)

    def _use_positions(self, tables: dict[Chunks | None, Any]) -> None:
        """Tables by the chunks whose positions they hold; None: of whole samples, from which others are made."""
        self._positions = tables
        if self._chunks is not None and self._chunks not in tables:
            tables[self._chunks] = OwnPositions(tables[None], self._chunks)
        self._layer.self_attn.rotary_emb = tables[self._chunks]

    def switch(self, training: bool, adapters: bool) -> None:
        """Switch dropout, as for training, and adapters on or off."""
        self._layer.train() if training else self._layer.eval()
        for layer in self._layer.sublayers():
            if isinstance(layer, LoRALinear):
                layer.counts = adapters

    def _run_or_recompute(self, x: Any, mask: Any, memo: Memo) -> Any:
        if not paddle.is_grad_enabled():  # the first time
            return self._run(x, mask, memo)
        with span("recompute", "recompute"):
            return self._run(x, mask, memo)

    def _run(self, x: Any, mask: Any, memo: Memo) -> Any:
        numbers, self._memo = self._placement.numbers, memo
        with compute_weights(self._slots, numbers):
            return cast(self._layer(cast(x, numbers.computed), attention_mask=mask), numbers.stored)

    def _patch(self) -> None:
        place, shape, layer = self._placement, self._shape, self._layer
        attention, degree = layer.self_attn, place.mesh.degree(Axis.TENSOR, Axis.ULYSSES)
        attention.num_heads = shape.heads // degree
        self._use_positions({None: attention.rotary_emb})
        self._reduce_after(attention.o_proj, CommPoint.OUT_OF_ATTENTION)
        if shape.latents:
            self._patch_latents(layer.input_layernorm, attention, shape.latents)
        else:
            self._patch_heads(layer.input_layernorm, attention, degree)
        if self._experts and shape.traits.mixture:
            self._patch_experts(getattr(layer, shape.traits.mixture.inside), self._experts)
        else:
            self._reduce_after(layer.mlp.down_proj, CommPoint.OUT_OF_MLP)
            self._patch_mlp(layer.post_attention_layernorm, layer.mlp)

    def _patch_heads(self, norm: Any, attention: Any, degree: int) -> None:
        place, shape, normed = self._placement, self._shape, norm.forward
        attention.num_key_value_heads = max(shape.kv_heads // degree, 1)
        attention.num_key_value_groups = attention.num_heads // attention.num_key_value_heads
        for point, projection, heads in (
            (CommPoint.QUERY, attention.q_proj, shape.heads),
            (CommPoint.KEY, attention.k_proj, shape.kv_heads),
            (CommPoint.VALUE, attention.v_proj, shape.kv_heads),
        ):
            self._after(projection, lambda x, point=point, heads=heads: self._to_attention(point, x, heads))
        self._gather_for(CommPoint.INTO_ATTENTION, attention.q_proj, attention.k_proj, attention.v_proj)
        into = self._part(Recompute.NORMS, attention.q_proj, attention.k_proj, attention.v_proj)
        norm.forward = partial(into, lambda x: place.cross(CommPoint.INTO_ATTENTION, normed(x)))
        self._patch_core(attention)

    def _patch_latents(self, norm: Any, attention: Any, sizes: Latents) -> None:
        normed, down = norm.forward, attention.kv_a_proj_with_mqa
        if sizes.q_lora_rank:
            queries = attention.q_a_proj
            self._gather_for(CommPoint.LATENT_QUERY, attention.q_b_proj)
        else:
            queries = attention.q_proj
            self._gather_for(CommPoint.INTO_ATTENTION, queries)
        self._gather_for(CommPoint.LATENT, attention.kv_b_proj)
        norm.forward = partial(self._part(Recompute.NORMS, down, queries), normed)
        attention.num_key_value_groups = 1
        lengths = self._seq_length, self._own_length
        attention.forward = LatentAttention(attention, sizes, lengths, self._placement.cross)
        self._patch_core(attention)

    def _patch_core(self, attention: Any) -> None:
        place, plain = self._placement, attention.attn_func
        core = plain
        groups, chunks, fused = 1, self._chunks, attention.config.use_flash_attention
        if fused:
            core = flash(hidden_rows(chunks, self._seq_length) if chunks else None)
        if not fused and (chunks or Recompute.ATTENTION in self._recompute):
            # k and v are repeated for the heads of q in the recomputed part, so that they are kept but once; and behind
            # their all-gather.
            groups, attention.num_key_value_groups = attention.num_key_value_groups, 1
        part = self._part(Recompute.ATTENTION, attention.o_proj)
        documents = Documents(chunks, self._seq_length, fused)

        def context(q: Any, config: Any, k: Any, v: Any, mask: Any, *rest: Any, **named: Any) -> Any:
            def run(q: Any, k: Any, v: Any) -> Any:
                k, v = (x if groups == 1 else _repeat_heads(x, groups) for x in (k, v))
                if mask is not None and mask.ndim == 2:
                    attend = documents.attention(mask, plain)
                    return place.cross(CommPoint.CONTEXT, _flat(attend(q, config, k, v, None, *rest, **named)))
                # PaddleNLP wants the mask whole; it is gone when attention has used it.
                own = mask if mask is None or not chunks else own_rows(mask, chunks, axis=2)
                whole = None if own is None else own.expand([q.shape[0], 1, -1, -1])
                return place.cross(CommPoint.CONTEXT, _flat(core(q, config, k, v, whole, *rest, **named)))

            if chunks:
                k, v = place.cross(CommPoint.ALL_KEYS, k), place.cross(CommPoint.ALL_VALUES, v)
            return part(run, q, k, v)

        attention.attn_func = context

    def _own_experts(self, strategy: LayerStrategy, prefix: str, load: LayerLoad, padding: Padding) -> OwnExperts:
        """This rank's experts, whose weights stand with the layer's others."""
        place, shape = self._placement, self._shape
        local = shape.experts // strategy.ep
        first = place.experts.index(place.local, Axis.EXPERT) * local
        exchange = place.group(*EXCHANGE, mesh=place.experts)
        own = OwnExperts(shape, strategy.experts, exchange, place.numbers, load, padding)
        weights = shape.routed.weights[3 * first : 3 * (first + local)]  # gate, up and down of each
        for kind, name in enumerate(PRODUCTS if weights else ()):
            record = stacked((place.parameter(weight, prefix) for weight in weights[kind::3]), local)
            setattr(own.layer, name, record.tensor)
            self._slots.append((own.layer, name, record))
        return own

    def _patch_experts(self, mixture: Any, own: OwnExperts) -> None:
        place, traits = self._placement, self._shape.traits.mixture
        assert traits
        shared = getattr(mixture, traits.shared) if self._shape.shared_size else None
        if shared is not None:
            self._gather_for(CommPoint.INTO_MLP, shared.gate_proj, shared.up_proj)
            self._reduce_after(shared.down_proj, CommPoint.OUT_OF_MLP)
            shared.forward = lambda x: shared.down_proj(swiglu(shared.gate_proj(x), shared.up_proj(x)))
        gate = getattr(mixture, f"{traits.shared}_gate") if shared is not None and traits.gated else None

        def forward(x: Any) -> Any:
            routed = own(place.cross(CommPoint.INTO_EXPERTS, x), mixture.gate, self._memo)
            out = place.cross(CommPoint.OUT_OF_EXPERTS, routed)
            if shared is None:
                return out
            whole = shared(place.cross(CommPoint.INTO_MLP, x))
            return out + (nn.functional.sigmoid(gate(x)) * whole if gate is not None else whole)

        mixture.forward = forward

    def _patch_mlp(self, norm: Any, mlp: Any) -> None:
        normed, gate, up, down = norm.forward, mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self._gather_for(CommPoint.INTO_MLP, gate, up)
        part = self._part(Recompute.NORMS | Recompute.MLP, down)

        def into(x: Any) -> Any:
            return self._placement.cross(CommPoint.INTO_MLP, normed(x))

        def product(x: Any) -> Any:
            return swiglu(gate(x), up(x))

        mlp.forward = lambda x: down(product(x))
        if Recompute.NORMS | Recompute.MLP in self._recompute:  # one part
            norm.forward = lambda x: x
            mlp.forward = lambda x: down(part(lambda x: product(into(x)), x))
            return
        norm.forward = partial(self._part(Recompute.NORMS, gate, up), into)
        if Recompute.MLP in self._recompute:
            mlp.forward = lambda x: down(part(product, x))
        elif Recompute.NORMS in self._recompute:
            mlp.forward = lambda x: down(part(swiglu, gate(x), up(x)))

    def _part(self, parts: Recompute, *readers: Any) -> Any:
        """A caller of the function that produces these readers' input; backward repeats the call under recompute."""
        if not parts & self._recompute:
            return lambda run, *inputs: run(*inputs)
        return RecomputedPart(readers, partial(compute_weights, self._slots, self._placement.numbers))

    def _gather_for(self, point: CommPoint, *readers: Any) -> None:
        """Let layers share the gathered tokens, which are kept where the layers run again for backward."""
        place = self._placement
        if place.gathers(point):
            read_together([*readers], partial(place.products, point, point in repeated(self._recompute)))

    def _reduce_after(self, projection: Any, point: CommPoint) -> None:
        """Sum the output of a row-split projection, then add its bias, if it has one."""
        place = self._placement
        if projection.bias is None:
            self._after(projection, lambda x: place.cross(point, x))
        else:
            product = getattr(projection, "product", None)  # LoRA's
            projection.forward = product or (lambda x: paddle.matmul(x, projection.weight))
            self._after(projection, lambda x: place.cross(point, x) + projection.bias)

    def _to_attention(self, point: CommPoint, x: Any, heads: int) -> Any:
        """[T, …] of all heads that the projection gives -> [B, S, …] of this rank's."""
        copies = self._placement.mesh.degree(Axis.ULYSSES) // heads
        if copies > 1:  # fewer kv heads than ranks: each goes to several
            x = _repeat_heads(x.reshape([x.shape[0], heads, -1]), copies).reshape([x.shape[0], -1])
        x = self._placement.cross(point, x)
        return x.reshape([-1, self._own_length, x.shape[-1]])

    def _after(self, layer: Any, point: Any) -> None:
        layer.register_forward_post_hook(lambda _layer, _inputs, output: point(output))


def _repeat_heads(x: Any, times: int) -> Any:
    """[…, heads, D] -> […, heads · times, D], each head as often in a row. Paddle's `repeat_interleave` has no fp16 on
    GPUs, and copies its indices to the device at each call."""
    *others, heads, width = x.shape
    return x.unsqueeze(-2).expand([*others, heads, times, width]).reshape([*others, heads * times, width])


def _product(linear: Any, x: Any) -> Any:
    """A linear layer without bias in one call into Paddle, whose own function looks up flags before."""
    return paddle.matmul(x, linear.weight)


def _flat(x: Any) -> Any:
    return x.reshape([-1, x.shape[-1]])
