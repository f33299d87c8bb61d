"""One decoder layer of PaddleNLP under its own strategy: its weights replaced by shards, collectives at its seams.

Between layers the tokens of a micro-batch are flat, [T, H], and lie as `plan.layout` says. Attention alone wants whole
sequences: [B, S, H] with B·S tokens of the layer's dp share. The seams, by strategy (t = degree):

    strategy       into attention and MLP (behind the norm)      out of them (behind the row-split projection)
    tp, Megatron-SP  all-gather tokens [T] -> [T·t]                reduce-scatter
    tp, plain        identity; gradients all-reduced               all-reduce
    Ulysses          attention only: q, k, v all-to-all            attention only: all-to-all in front of o
    degree 1         nothing                                       nothing
"""

from __future__ import annotations

from typing import Any

import paddle
from paddle.distributed.fleet.utils import recompute

from ..model import ModelShape, Split, Weight
from ..plan import LayerStrategy, Plan
from ..plan.layout import Grid, grid_of
from .adapter import Adapter
from .collectives import Gather, HeadsToTokens, Reduce, Replicate, Scatter, TokensToHeads
from .groups import Groups
from .precision import Numbers, cast, compute_weights
from .weights import ShardedParameter, Slice, WeightSource, make_parameter, shard_layer


class Placement:
    """Where this rank stands in a layer's grid, and its groups. Shared by blocks and vocabulary layers."""

    def __init__(self, plan: Plan, strategy: LayerStrategy, rank: int, groups: Groups, numbers: Numbers):
        size = plan.stage_size
        self.numbers = numbers
        self.grid: Grid = grid_of(plan, strategy)
        self.first = rank // size * size
        self.local = rank - self.first
        self.degree, self.ulysses = strategy.degree, strategy.ulysses
        self.split = strategy.tp > 1  # weights are split
        self.sharded_tokens = plan.assumed.sequence_parallel and self.split
        self._groups = groups
        self.axis_group = groups.get(self._global(self.grid.tp_group(self.local)))
        self.dp_group = groups.get(self._global(self.grid.dp_group(self.local)))
        self.stage_group = groups.get(self._global(tuple(range(size))))

    def _global(self, local: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self.first + rank for rank in local)

    @property
    def index(self) -> int:
        return self.grid.index(self.local)

    def slice_of(self, weight: Weight) -> Slice:
        """Which part of a weight of this layer the rank holds."""
        if weight.axis is None or not self.split:
            return Slice()
        parts = weight.parts(self.degree)  # fewer than ranks, where neighbours share a kv head
        padded = weight.padded_length(self.degree) if weight.padded else None
        return Slice(weight.axis, self.index * parts // self.degree, parts, padded)

    def parameter(self, weight: Weight, prefix: str, source: WeightSource) -> ShardedParameter:
        """This rank's part of a weight of this layer: who sums its gradient, and how many ranks hold it."""
        name, shape, part = prefix + weight.name, weight.shape, self.slice_of(weight)
        tensor = make_parameter(source, name, shape, part, self.numbers.stored)
        # Plain tp computes the gradients of unsplit weights on every rank of the tp group alike, but for weights that
        # each uses on its own heads; in all other cases the ranks of a group see different tokens, so that theirs are
        # summed too.
        alike = self.split and not self.sharded_tokens and weight.split is not Split.HEADS
        sum_group = self.dp_group if part.axis is not None or alike else self.stage_group
        copies = None
        if part.axis is not None and part.parts < self.degree:  # kv heads that several ranks share
            copies = self._groups.get(self._global(self.grid.copies(self.local, part.parts)))
        replicas = self.grid.size // part.parts
        return ShardedParameter(name, shape, part, tensor, sum_group, replicas, self.numbers.gradients, copies)

    def enter(self, x: Any) -> Any:
        """Sharded or replicated tokens -> all tokens of the dp share, ready for a column-split projection."""
        if not self.split:
            return x
        return self.exchange(Gather if self.sharded_tokens else Replicate, x)

    def leave(self, x: Any) -> Any:
        """Partial sums behind a row-split projection -> tokens as they lie between layers."""
        if not self.split:
            return x
        return self.exchange(Scatter if self.sharded_tokens else Reduce, x)

    def exchange(self, collective: Any, x: Any) -> Any:
        """A differentiable collective over the layer's axis; messages are of the stored type."""
        out = collective.apply(cast(x, self.numbers.stored), self.axis_group)
        return cast(out, self.numbers.computed)


class Block:
    """Calls one decoder layer on flat tokens: [T, H] -> [T, H]."""

    def __init__(
        self,
        family: Adapter,
        shape: ModelShape,
        config: Any,
        index: int,
        strategy: LayerStrategy,
        placement: Placement,
        source: WeightSource,
    ):
        self._placement = placement
        self._recompute = strategy.recompute
        self._shape = shape
        self._seq_length: int = config.seq_length
        with paddle.LazyGuard():  # whole weights are never made
            self._layer = family.decoder_layer(shape, config)
        kind, prefix = shape.block, f"{shape.traits.prefix}.layers.{index}."
        self._slots = shard_layer(self._layer, lambda name: placement.parameter(kind[name], prefix, source))
        self.parameters: list[ShardedParameter] = [weight for _, _, weight in self._slots]
        self._cut_seams()

    def __call__(self, x: Any, mask: Any, samples: int) -> Any:
        """`x` [T, H] of B `samples`; `mask` [1, 1, S, S] to add to attention scores, or None where attention is causal
        itself."""
        again = self._recompute and paddle.is_grad_enabled()
        return recompute(self._run, x, mask, samples) if again else self._run(x, mask, samples)

    def train(self, training: bool) -> None:
        """With dropout, as for training, or without."""
        self._layer.train() if training else self._layer.eval()

    def samples(self, tokens: int) -> int:
        """Sequences of a micro-batch of so many tokens that this layer's attention sees here."""
        return tokens // self._placement.grid.dp // self._seq_length

    def _run(self, x: Any, mask: Any, samples: int) -> Any:
        numbers = self._placement.numbers
        if mask is not None:
            mask = mask.expand([samples, 1, -1, -1])  # PaddleNLP wants it whole; gone when attention has used it
        with compute_weights(self._slots, numbers):
            return cast(self._layer(cast(x, numbers.computed), attention_mask=mask), numbers.stored)

    def _cut_seams(self) -> None:
        place, shape = self._placement, self._shape
        attention = self._layer.self_attn
        attention.num_heads = shape.heads // place.degree
        attention.num_key_value_heads = max(shape.kv_heads // place.degree, 1)
        attention.num_key_value_groups = attention.num_heads // attention.num_key_value_heads
        mlp, after = self._layer.mlp, self._after
        after(self._layer.input_layernorm, lambda x: self._sequences(place.enter(x)) if not place.ulysses else x)
        after(self._layer.post_attention_layernorm, place.enter)
        self._leave_behind(mlp.down_proj)
        if place.ulysses and place.degree > 1:
            for projection, heads in (
                (attention.q_proj, shape.heads),
                (attention.k_proj, shape.kv_heads),
                (attention.v_proj, shape.kv_heads),
            ):
                after(projection, lambda x, heads=heads: self._to_heads(x, heads))
            self._before(attention.o_proj, lambda x: place.exchange(HeadsToTokens, _flat(x)))
        else:
            self._leave_behind(attention.o_proj)

    def _leave_behind(self, projection: Any) -> None:
        """Sum what a row-split projection puts out, and only then add its bias, if it has one."""
        place = self._placement
        if projection.bias is None:
            self._after(projection, lambda x: place.leave(_flat(x)))
        else:
            projection.forward = lambda x: paddle.matmul(x, projection.weight)
            self._after(projection, lambda x: place.leave(_flat(x)) + projection.bias)

    def _to_heads(self, x: Any, heads: int) -> Any:
        copies = self._placement.degree // heads
        if copies > 1:  # fewer kv heads than ranks: each goes to several
            each = x.reshape([x.shape[0], heads, -1])
            x = paddle.repeat_interleave(each, copies, axis=1).reshape([x.shape[0], -1])
        return self._sequences(self._placement.exchange(TokensToHeads, x))

    def _after(self, layer: Any, seam: Any) -> None:
        layer.register_forward_post_hook(lambda _layer, _inputs, output: seam(output))

    def _before(self, layer: Any, seam: Any) -> None:
        layer.register_forward_pre_hook(lambda _layer, inputs: (seam(inputs[0]),))

    def _sequences(self, x: Any) -> Any:
        return x.reshape([-1, self._seq_length, x.shape[-1]])


def _flat(x: Any) -> Any:
    return x.reshape([-1, x.shape[-1]])
