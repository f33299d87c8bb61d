"""Experts in PaddleNLP's decoder layers; PaddleNLP's own expert layers fail on Paddle 3.3.

A layer of the runtime has the router and the shared expert from here, and its routed experts from `runtime.experts`.
The whole model of one process has all experts from here, one after the other. It is the reference of parity and so
shares no code with the runtime.
"""

from __future__ import annotations

from typing import Any

import paddle
from paddle import nn

from ...model import ModelShape


class GatedMlp(nn.Layer):  # type: ignore[misc]
    """A gated MLP whose gate, up and down projections have the given names."""

    def __init__(self, hidden: int, inner: int, names: tuple[str, str, str]):
        super().__init__()
        self._names = names
        for name, size in zip(names, ((hidden, inner), (hidden, inner), (inner, hidden)), strict=True):
            setattr(self, name, nn.Linear(*size, bias_attr=False))

    def forward(self, x: Any) -> Any:
        gate, up, down = (getattr(self, name) for name in self._names)
        return down(nn.functional.silu(gate(x)) * up(x))


class Mixture(nn.Layer):  # type: ignore[misc]
    """Router and shared expert; with `whole` the routed experts, too."""

    def __init__(self, shape: ModelShape, whole: bool):
        super().__init__()
        mixture = shape.traits.mixture
        assert mixture
        self._shape = shape
        self._seen: list[tuple[Any, Any]] = []  # by pass: uses and scores of experts, sums over a sample
        self.gate = nn.Linear(shape.hidden_size, shape.experts, bias_attr=False)
        if shape.shared_size:
            self.shared_expert = GatedMlp(shape.hidden_size, shape.shared_size, ("gate_proj", "up_proj", "down_proj"))
            self.shared_expert_gate = nn.Linear(shape.hidden_size, 1, bias_attr=False)
        if whole:
            sizes = shape.hidden_size, shape.expert_size
            self.experts = nn.LayerList([GatedMlp(*sizes, mixture.projections) for _ in range(shape.experts)])

    def forward(self, x: Any) -> Any:
        scores = nn.functional.softmax(self.gate(x).astype("float32"), axis=-1)
        best, chosen = paddle.topk(scores, self._shape.experts_per_token, axis=-1)
        if self._shape.router_aux_loss_coef:
            uses = nn.functional.one_hot(chosen, self._shape.experts).sum((1, 2))
            self._seen.append((uses, scores.sum(1)))  # [B, E] each
        if self._shape.norm_topk:
            best = best / best.sum(-1, keepdim=True)
        out = paddle.zeros_like(x)
        for number, expert in enumerate(self.experts):
            share = (best * (chosen == number).astype(best.dtype)).sum(-1, keepdim=True)  # 0 for most tokens
            out = out + share.astype(x.dtype) * expert(x)
        if self._shape.shared_size:
            out = out + nn.functional.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)
        return out

    def balance(self, share: Any) -> Any:
        """Balance loss, summed over rows, of the passes since it was last read. `share` [rows, samples]: of a
        sample that is in a row one over the row's tokens, else 0."""
        uses, scores = (share @ paddle.concat(each) for each in zip(*self._seen, strict=True))
        self._seen.clear()
        return self._shape.experts * (uses * scores).sum()


class WithExperts:
    """Mixin for the adapter of the dense family with the same attention and norms."""

    def whole_model(self, shape: ModelShape, config: Any) -> Any:
        model = super().whole_model(shape, config)  # type: ignore[misc]
        for index, layer in enumerate(getattr(model, shape.traits.prefix).layers):
            if shape.of(index).experts:
                put(layer, shape, Mixture(shape, whole=True))
        return model

    def _fit(self, layer: Any, shape: ModelShape, config: Any) -> None:
        if shape.experts:
            put(layer, shape, Mixture(shape, whole=False))
        super()._fit(layer, shape, config)  # type: ignore[misc]


def put(layer: Any, shape: ModelShape, mixture: Mixture) -> None:
    """Replace the MLP of a PaddleNLP decoder layer."""
    assert shape.traits.mixture
    inside = shape.traits.mixture.inside
    if inside != "mlp" and "mlp" in layer._sub_layers:
        del layer.mlp
        object.__setattr__(layer, "mlp", lambda x: getattr(layer, inside)(x))
    setattr(layer, inside, mixture)
