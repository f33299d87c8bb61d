"""One decoder layer of PaddleNLP under its own strategy: its weights replaced by shards, with collectives.

Between layers the tokens of a micro-batch are flat, [T, H], in the layout of `plan.layout`. Only core attention needs
whole sequences: [B, S, …] with B·S tokens of the layer's dp share. `plan.comm_points` lists the collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import paddle
from paddle import nn
from paddle.distributed.fleet.utils import recompute
from paddle.incubate.nn.functional import swiglu

from ..model import Weight
from ..model.lora import FACTORS, adapted, factors_of
from ..plan import LayerStrategy, Recompute
from ..plan.comm_points import CommPoint, repeated
from ..plan.layout import own_chunks
from ..plan.mesh import EXCHANGE, SAMPLE_AXES, Axis
from .activations import Window
from .attention import Chunks, Documents, LatentAttention, OwnPositions, flash, hidden_rows, own_rows
from .experts import PRODUCTS, Memo, OwnExperts
from .grouped import Padding
from .groups import RankGroups
from .lora import LoRALinear, add_adapters
from .mappings import read_together
from .placement import Placement
from .precision import cast
from .recompute import RecomputedPart
from .router import ExpertLoad, LayerLoad
from .setup import ModelSetup
from .trace import span
from .weights import ShardedParameter, compute_weights, shard_layer, stacked

# Point, module (or modules), and the operation that is called with both.
Applied = tuple[CommPoint | None, Any, Callable[[Any, Any], None]]


class Block:
    """Calls one decoder layer on flat tokens: [T, H] -> [T, H]; an MTP layer [T, 2H] -> [T, H], of the next token's
    embedding and the hidden state after the last norm."""

    def __init__(self, setup: ModelSetup, here: RankGroups, index: int, load: ExpertLoad, window: Window, chunk: int):
        strategy, adapters = setup.plan.layers[index], setup.adapters
        self._placement = placement = Placement(setup, here, strategy)
        self.samples = placement.samples
        self._recompute = strategy.recompute
        self._shape = shape = setup.shape.of(index)
        self._window, self._offload = window, strategy.offload
        self._fixed: set[int] = set()  # addresses of cast weights, which are not offloaded
        self._recorded = chunk, (strategy, shape), strategy.offload, self._fixed
        self.is_mtp = shape.mtp_layers > 0
        context = placement.mesh.degree(Axis.CONTEXT)
        self._seq_length = setup.seq_length
        self._query_length = self._seq_length // context  # length of this rank's queries in attention
        index_of_chunks = placement.mesh.index(placement.local, Axis.CONTEXT)
        self._chunks = own_chunks(index_of_chunks, context, self._seq_length) if context > 1 else None
        with paddle.LazyGuard():  # never allocates whole weights
            self._layer = setup.family.decoder_layer(shape, setup.config)
            if adapters:
                add_adapters(self._layer, [name.removesuffix(".weight") for name in shape.block.projections], adapters)
        kind = adapted(shape.block, adapters.rank) if adapters else shape.block
        prefix = f"{shape.traits.prefix}.layers.{index}."
        self._slots = shard_layer(self._layer, lambda name: placement.parameter(kind[name], prefix))
        self._memo: Memo = {}
        self._experts = None
        if shape.experts:
            layer_load = LayerLoad(load, placement.own_samples(strategy), placement.group(*SAMPLE_AXES))
            self._experts = self._make_experts(strategy, prefix, layer_load, load.padding)
        self.parameters: list[ShardedParameter] = [weight for _, _, weight in self._slots]
        for inner in self._layer.sublayers():
            if type(inner) is nn.Linear and inner.bias is None:
                inner.forward = partial(_product, inner)
        self._use_positions({None: self._layer.self_attn.rotary_emb})
        for point, modules, operation in self._operations():
            operation(point, modules)

    def __call__(self, x: Any, mask: Any) -> Any:
        """`x` [T, H]; `mask` [1, 1, S, S] to add to attention scores, None if attention is causal itself; or [B, S],
        the end of each key's document, which bounds attention."""
        again = self._recompute is Recompute.FULL and paddle.is_grad_enabled()
        memo: Memo = {}
        run = partial(recompute, self._run_or_recompute) if again else self._run
        if not self._offload or not paddle.is_grad_enabled():
            return run(x, mask, memo)
        with self._window.recording(*self._recorded, by_paddle=again):
            return run(x, mask, memo)

    def share_positions(self, other: Block) -> None:
        """Share another layer's equal tables of positions: 4 MiB for 4096 tokens."""
        self._use_positions(other._positions)

    def _use_positions(self, tables: dict[Chunks | None, Any]) -> None:
        """Tables by the chunks whose positions they hold; None: whole samples, the source of the others."""
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
        if self._experts:
            self._experts.counts = adapters

    def _run_or_recompute(self, x: Any, mask: Any, memo: Memo) -> Any:
        if not paddle.is_grad_enabled():  # the first time
            return self._run(x, mask, memo)
        with span("recompute", "recompute"):
            return self._run(x, mask, memo)

    def _run(self, x: Any, mask: Any, memo: Memo) -> Any:
        numbers, self._memo = self._placement.numbers, memo
        with compute_weights(self._slots, numbers):
            if self._offload and numbers.casts:
                self._fixed.clear()
                self._fixed.update(getattr(layer, name).data_ptr() for layer, name, _ in self._slots)
            layer, x = self._layer, cast(x, numbers.computed.dtype)
            if not self.is_mtp:
                return cast(layer(x, attention_mask=mask), numbers.stored.dtype)
            embedded, hidden = x.chunk(2, -1)
            x = layer.eh_proj(paddle.concat([layer.enorm(embedded), layer.hnorm(hidden)], -1))
            return cast(layer.shared_head.norm(layer(x, attention_mask=mask)), numbers.stored.dtype)

    def _operations(self) -> list[Applied]:
        """Changes of PaddleNLP's layer, in the order in which they are applied. A projection is patched before the
        recompute of the part that it reads: the part's memory is freed when the patched projection has run."""
        layer, shape, attention = self._layer, self._shape, self._layer.self_attn
        norm, out = layer.input_layernorm, attention.o_proj
        applied: list[Applied] = [(CommPoint.OUT_OF_ATTENTION, out, self._reduce)]
        if shape.latents:
            down, up = attention.kv_a_proj_with_mqa, attention.kv_b_proj
            if shape.latents.q_lora_rank:
                queries = attention.q_a_proj
                applied += [(CommPoint.LATENT_QUERY, [attention.q_b_proj], self._gather)]
            else:
                queries = attention.q_proj
                applied += [(CommPoint.INTO_ATTENTION, [queries], self._gather)]
            applied += [
                (CommPoint.LATENT, [up], self._gather),
                (None, [norm, down, queries], self._recompute_norm),
                (None, attention, self._use_latents),
            ]
        else:
            q, k, v = attention.q_proj, attention.k_proj, attention.v_proj
            applied += [
                (CommPoint.QUERY, q, self._exchange_heads),
                (CommPoint.KEY, k, self._exchange_heads),
                (CommPoint.VALUE, v, self._exchange_heads),
                (CommPoint.INTO_ATTENTION, [q, k, v], self._gather),
                (CommPoint.INTO_ATTENTION, [norm, q, k, v], self._recompute_norm),
            ]
        applied += [(CommPoint.CONTEXT, attention, self._replace_core)]
        mixture, norm = shape.traits.mixture if self._experts else None, layer.post_attention_layernorm
        module = getattr(layer, mixture.inside) if mixture else layer.mlp
        mlp = module if not mixture else getattr(module, mixture.shared) if shape.shared_size else None
        if mlp is not None:
            applied += [
                (CommPoint.INTO_MLP, [mlp.gate_proj, mlp.up_proj], self._gather),
                (CommPoint.OUT_OF_MLP, mlp.down_proj, self._reduce),
            ]
        if mixture:
            return [*applied, (CommPoint.OUT_OF_EXPERTS, module, partial(self._replace_mixture, shared=mlp))]
        return [*applied, (CommPoint.INTO_MLP, [norm, mlp], self._replace_mlp)]

    def _gather(self, point: CommPoint, readers: list[Any]) -> None:
        """Make layers share gathered tokens, which are kept while the layers run again for backward."""
        if self._placement.gathers(point):
            read_together(readers, partial(self._placement.products, point, point in repeated(self._recompute)))

    def _reduce(self, point: CommPoint, projection: Any) -> None:
        """Sum the output of a row-split projection, then add its bias, if it has one."""
        bias, cross = projection.bias, partial(self._placement.cross, point)
        if bias is not None:
            product = getattr(projection, "product", None)  # LoRA's
            projection.forward = product or (lambda x: paddle.matmul(x, projection.weight))
        _after(projection, cross if bias is None else lambda x: cross(x) + projection.bias)

    def _exchange_heads(self, point: CommPoint, projection: Any) -> None:
        """Turn [T, …] of all heads that the projection gives into [B, S, …] of this rank's."""
        heads = self._shape.heads if point is CommPoint.QUERY else self._shape.kv_heads
        copies = self._placement.mesh.degree(Axis.ULYSSES) // heads

        def exchange(x: Any) -> Any:
            if copies > 1:  # fewer kv heads than ranks: each goes to several
                x = _repeat_heads(x.reshape([x.shape[0], heads, -1]), copies).reshape([x.shape[0], -1])
            x = self._placement.cross(point, x)
            return x.reshape([-1, self._query_length, x.shape[-1]])

        _after(projection, exchange)

    def _recompute_norm(self, point: CommPoint | None, modules: list[Any]) -> None:
        """Communicate the norm's output, and recompute both; its readers follow it in `modules`."""
        norm, *readers = modules
        normed, cross = norm.forward, self._placement.cross
        call = self._recomputed(Recompute.NORMS, *readers)
        norm.forward = partial(call, normed if point is None else lambda x: cross(point, normed(x)))

    def _use_latents(self, _: None, attention: Any) -> None:
        sizes, lengths = self._shape.latents, (self._seq_length, self._query_length)
        assert sizes
        attention.forward = LatentAttention(attention, sizes, lengths, self._placement.cross)

    def _replace_core(self, point: CommPoint, attention: Any) -> None:
        """Give core attention this rank's heads and queries, and the keys and values of whole samples."""
        placement, plain, shape = self._placement, attention.attn_func, self._shape
        ranks = placement.mesh.degree(Axis.TENSOR, Axis.ULYSSES)
        heads = attention.num_heads = shape.heads // ranks
        kv_heads = attention.num_key_value_heads = heads if shape.latents else max(shape.kv_heads // ranks, 1)
        groups, attention.num_key_value_groups = 1, heads // kv_heads
        core, chunks, fused = plain, self._chunks, attention.config.use_flash_attention
        if fused:
            core = flash(hidden_rows(chunks, self._seq_length) if chunks else None)
        elif chunks or Recompute.ATTENTION in self._recompute:
            # k and v are repeated for the heads of q inside the recomputed part, so that they are kept once, and after
            # their all-gather.
            groups, attention.num_key_value_groups = heads // kv_heads, 1
        call = self._recomputed(Recompute.ATTENTION, attention.o_proj)
        documents = Documents(chunks, self._seq_length, fused)

        def context(q: Any, config: Any, k: Any, v: Any, mask: Any, *rest: Any, **keywords: Any) -> Any:
            def run(q: Any, k: Any, v: Any) -> Any:
                k, v = (x if groups == 1 else _repeat_heads(x, groups) for x in (k, v))
                if mask is not None and mask.ndim == 2:
                    out = documents.attention(mask, plain)(q, config, k, v, None, *rest, **keywords)
                else:  # PaddleNLP needs the whole mask, which is freed after use
                    rows = mask if mask is None or not chunks else own_rows(mask, chunks, axis=2)
                    whole = None if rows is None else rows.expand([q.shape[0], 1, -1, -1])
                    out = core(q, config, k, v, whole, *rest, **keywords)
                return placement.cross(point, out.reshape([-1, out.shape[-1]]))

            if chunks:
                k, v = placement.cross(CommPoint.ALL_KEYS, k), placement.cross(CommPoint.ALL_VALUES, v)
            return call(run, q, k, v)

        attention.attn_func = context

    def _replace_mlp(self, point: CommPoint, modules: list[Any]) -> None:
        """Recompute the norm, the product of gate and up, or both as one part."""
        norm, mlp = modules
        normed, gate, up, down = norm.forward, mlp.gate_proj, mlp.up_proj, mlp.down_proj
        call = self._recomputed(Recompute.NORMS | Recompute.MLP, down)

        def product(x: Any) -> Any:
            return swiglu(gate(x), up(x))

        if Recompute.NORMS | Recompute.MLP in self._recompute:  # one part
            norm.forward = lambda x: x
            mlp.forward = lambda x: down(call(lambda x: product(self._placement.cross(point, normed(x))), x))
            return
        self._recompute_norm(point, [norm, gate, up])
        if Recompute.NORMS in self._recompute:
            mlp.forward = lambda x: down(call(swiglu, gate(x), up(x)))
        else:
            mlp.forward = lambda x: down(call(product, x))

    def _replace_mixture(self, point: CommPoint, module: Any, shared: Any) -> None:
        """Run this rank's experts, and the `shared` expert if the layer has one."""
        experts, cross, traits = self._experts, self._placement.cross, self._shape.traits.mixture
        assert experts and traits
        gate = getattr(module, f"{traits.shared}_gate") if shared is not None and traits.gated else None
        if shared is not None:
            shared.forward = lambda x: shared.down_proj(swiglu(shared.gate_proj(x), shared.up_proj(x)))

        def forward(x: Any) -> Any:
            rows = cross(CommPoint.INTO_EXPERTS, x)
            out = cross(point, experts(rows, module.gate, module.choice_bias, self._memo))
            if shared is None:
                return out
            whole = shared(cross(CommPoint.INTO_MLP, x))
            return out + (nn.functional.sigmoid(gate(x)) * whole if gate is not None else whole)

        module.forward = forward

    def _recomputed(self, parts: Recompute, *readers: Any) -> Any:
        """A caller of the function that produces these readers' input; backward repeats the call under recompute."""
        if not parts & self._recompute:
            return lambda run, *inputs: run(*inputs)
        return RecomputedPart(readers, partial(compute_weights, self._slots, self._placement.numbers))

    def _make_experts(self, strategy: LayerStrategy, prefix: str, load: LayerLoad, padding: Padding) -> OwnExperts:
        """This rank's experts, whose weights are stored with the layer's others."""
        placement, shape = self._placement, self._shape
        local = shape.experts // strategy.ep
        first = placement.experts.index(placement.local, Axis.EXPERT) * local
        exchange = placement.group(*EXCHANGE, mesh=placement.experts)
        adapters = placement.setup.adapters
        experts = OwnExperts(shape, strategy.experts, exchange, placement.numbers, load, padding, adapters)

        def stack(weights: Sequence[Weight], names: Sequence[str]) -> None:
            """`weights`: those with these names of each expert of the layer."""
            every = len(names)
            for index, name in enumerate(names if weights else ()):
                of_name = weights[every * first + index : every * (first + local) : every]
                record = stacked((placement.parameter(weight, prefix) for weight in of_name), local)
                setattr(experts.layer, name, record.tensor)
                self._slots.append((experts.layer, name, record))

        stack(shape.routed.weights, PRODUCTS)
        if adapters:
            names = [f"{name}_{factor}" for name in PRODUCTS for factor in FACTORS]
            stack(factors_of(shape.routed, adapters.rank).weights, names)
        return experts


def _after(layer: Any, operation: Callable[[Any], Any]) -> None:
    layer.register_forward_post_hook(lambda _layer, _inputs, output: operation(output))


def _repeat_heads(x: Any, times: int) -> Any:
    """[…, heads, D] -> […, heads · times, D], each head repeated consecutively. Paddle's `repeat_interleave` has no
    fp16 on GPUs, and copies its indices to the device at each call."""
    *others, heads, width = x.shape
    return x.unsqueeze(-2).expand([*others, heads, times, width]).reshape([*others, heads * times, width])


def _product(linear: Any, x: Any) -> Any:
    """A linear layer without bias in one call, as Paddle's function first looks up flags."""
    return paddle.matmul(x, linear.weight)
