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

from ..plan import LayerStrategy, Plan
from ..plan.layout import Grid, grid_of
from .collectives import Gather, HeadsToTokens, Reduce, Replicate, Scatter, TokensToHeads
from .family import Family
from .groups import Groups
from .precision import Numbers, cast, compute_weights
from .weights import ShardedParameter, Slice, WeightSource, shard_layer


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

    def parameter(self, name: str, shape: tuple[int, ...], part: Slice, tensor: Any) -> ShardedParameter:
        """The record of a weight of this layer: who sums its gradient, and how many ranks hold it."""
        # Plain tp computes the gradients of unsplit weights on every rank of the tp group alike; in all other cases
        # the ranks of a group see different tokens, so that theirs are summed too.
        alike = self.split and not self.sharded_tokens
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
        family: Family,
        config: Any,
        index: int,
        strategy: LayerStrategy,
        placement: Placement,
        source: WeightSource,
    ):
        self._placement = placement
        self._family = family
        self._recompute = strategy.recompute
        self._kv_heads: int = config.num_key_value_heads
        self._seq_length: int = config.seq_length
        with paddle.LazyGuard():  # whole weights are never made
            self._layer = family.decoder_layer(config)
        prefix, stored = f"{family.prefix}.layers.{index}.", placement.numbers.stored
        self._slots = shard_layer(self._layer, prefix, self._part_of, placement.parameter, source, stored)
        self.parameters: list[ShardedParameter] = [weight for _, _, weight in self._slots]
        self._cut_seams(config)

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

    def _part_of(self, parameter: str) -> Slice:
        if not self._placement.split:
            return Slice()
        owner, _, attribute = parameter.rpartition(".")
        index, degree = self._placement.index, self._placement.degree
        if owner in self._family.attention_kv and self._kv_heads < degree:  # neighbours share a kv head
            degree, index = self._kv_heads, index * self._kv_heads // degree
        if owner in (*self._family.attention_columns, *self._family.mlp_columns):  # weights [in, out], biases [out]
            return Slice(1 if attribute == "weight" else 0, index, degree)
        if owner in (self._family.attention_row, self._family.mlp_row):
            return Slice(0, index, degree)
        return Slice()

    def _cut_seams(self, config: Any) -> None:
        place, family = self._placement, self._family
        attention = self._sub_layer(family.attention)
        attention.num_heads = config.num_attention_heads // place.degree
        attention.num_key_value_heads = max(config.num_key_value_heads // place.degree, 1)
        attention.num_key_value_groups = attention.num_heads // attention.num_key_value_heads
        after, before = self._after, self._before
        after(family.attention_norm, lambda x: self._sequences(place.enter(x)) if not place.ulysses else x)
        after(family.mlp_norm, place.enter)
        after(family.mlp_row, place.leave)
        if place.ulysses and place.degree > 1:
            for projection in family.attention_columns:
                copies = place.degree // self._kv_heads if projection in family.attention_kv else 1
                after(projection, lambda x, copies=copies: self._to_heads(x, copies))
            before(family.attention_row, lambda x: place.exchange(HeadsToTokens, _flat(x)))
        else:
            after(family.attention_row, lambda x: place.leave(_flat(x)))

    def _to_heads(self, x: Any, copies: int) -> Any:
        if copies > 1:  # fewer kv heads than ranks: each goes to several
            heads = x.reshape([x.shape[0], self._kv_heads, -1])
            x = paddle.repeat_interleave(heads, copies, axis=1).reshape([x.shape[0], -1])
        return self._sequences(self._placement.exchange(TokensToHeads, x))

    def _sub_layer(self, path: str) -> Any:
        layer = self._layer
        for step in path.split("."):
            layer = getattr(layer, step)
        return layer

    def _after(self, path: str, seam: Any) -> None:
        self._sub_layer(path).register_forward_post_hook(lambda _layer, _inputs, output: seam(output))

    def _before(self, path: str, seam: Any) -> None:
        self._sub_layer(path).register_forward_pre_hook(lambda _layer, inputs: (seam(inputs[0]),))

    def _sequences(self, x: Any) -> Any:
        return x.reshape([-1, self._seq_length, x.shape[-1]])


def _flat(x: Any) -> Any:
    return x.reshape([-1, x.shape[-1]])
