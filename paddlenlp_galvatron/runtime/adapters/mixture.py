"""Experts in PaddleNLP's decoder layers; PaddleNLP's own expert layers fail on Paddle 3.3.

A layer of the runtime uses the router and the shared expert from here, and routed experts from `runtime.experts`. The
whole model of one process, the reference of parity, has all experts from here, one after the other, and so shares no
code with the runtime.
"""

from functools import reduce
from typing import Any

import paddle
from paddle import nn

from ...model import ModelShape
from ...model.families import LEAST_SUM, Mixture


class GatedMlp(nn.Layer):  # type: ignore[misc]
    """A gated MLP whose gate, up and down projections have the given names."""

    def __init__(self, hidden: int, inner: int, names: tuple[str, str, str] = Mixture.projections, bias: bool = False):
        super().__init__()
        self._names = names
        for name, size in zip(names, ((hidden, inner), (hidden, inner), (inner, hidden)), strict=True):
            setattr(self, name, nn.Linear(*size, bias_attr=None if bias else False))

    def forward(self, x: Any) -> Any:
        gate, up, down = (getattr(self, name) for name in self._names)
        return down(nn.functional.silu(gate(x)) * up(x))


class MixtureLayer(nn.Layer):  # type: ignore[misc]
    """Router and shared expert; with `whole` also the routed experts."""

    def __init__(self, shape: ModelShape, whole: bool):
        super().__init__()
        mixture = shape.traits.mixture
        assert mixture
        self._shape = shape
        self._seen: list[tuple[Any, Any]] = []  # by pass: uses and scores of experts, sums over a sample
        self.gate = nn.Linear(shape.hidden_size, shape.experts, bias_attr=False)
        for bias in (weight for weight in shape.block.weights if weight.state):
            *_, holder, name = bias.name.split(".")
            if holder != "gate":
                setattr(self, holder, nn.Layer())
            parameter = self.create_parameter(list(bias.shape), dtype="float32", is_bias=True)
            getattr(self, holder).add_parameter(name, parameter)
        if shape.shared_size:
            setattr(self, mixture.shared, GatedMlp(shape.hidden_size, shape.shared_size, bias=shape.mlp_bias))
            if mixture.gated:
                setattr(self, f"{mixture.shared}_gate", nn.Linear(shape.hidden_size, 1, bias_attr=False))
        if whole:
            sizes = shape.hidden_size, shape.expert_size
            self.experts = nn.LayerList([GatedMlp(*sizes, mixture.projections) for _ in range(shape.experts)])

    @property
    def choice_bias(self) -> Any:
        """The bias of each expert for the choice, [E] or [1, E]; None: the family has none."""
        mixture = self._shape.traits.mixture
        assert mixture
        return reduce(getattr, mixture.bias.split("."), self) if mixture.bias else None

    def forward(self, x: Any) -> Any:
        shape, mixture, logits = self._shape, self._shape.traits.mixture, self.gate(x).astype("float32")
        assert mixture
        scores = nn.functional.sigmoid(logits) if mixture.sigmoid else nn.functional.softmax(logits, axis=-1)
        chosen = self._chosen(scores.detach().numpy())
        best = paddle.take_along_axis(scores, chosen, axis=-1)
        if shape.router_aux_loss_coef:
            uses = nn.functional.one_hot(chosen, shape.experts).sum((1, 2))
            self._seen.append((uses, (scores / scores.sum(-1, keepdim=True)).sum(1)))  # [B, E] each
        if shape.norm_topk:
            best = best / paddle.maximum(best.sum(-1, keepdim=True), paddle.to_tensor(LEAST_SUM))
        best = best * shape.routed_scaling_factor
        out = paddle.zeros_like(x)
        for number, expert in enumerate(self.experts):
            share = (best * (chosen == number).astype(best.dtype)).sum(-1, keepdim=True)  # 0 for most tokens
            out = out + share.astype(x.dtype) * expert(x)
        if shape.shared_size:
            share = nn.functional.sigmoid(getattr(self, f"{mixture.shared}_gate")(x)) if mixture.gated else 1.0
            out = out + share * getattr(self, mixture.shared)(x)
        return out

    def _chosen(self, scores: Any) -> Any:
        """Numbers of the experts of each token [B, S, k], one token after the other. `scores` [B, S, E]."""
        shape, bias = self._shape, self.choice_bias
        scores, best_of_group = (scores, 1) if bias is None else (scores + bias.numpy(), 2)
        *where, experts = scores.shape
        size, chosen = experts // shape.expert_groups, []
        for token in scores.reshape([-1, experts]).tolist():
            groups = [token[first : first + size] for first in range(0, experts, size)]
            worth = [sum(sorted(group)[-best_of_group:]) for group in groups]
            kept = sorted(range(len(groups)), key=lambda group: -worth[group])[: shape.groups_per_token]
            inside = [expert for expert in range(experts) if expert // size in kept]
            chosen.append(sorted(inside, key=lambda expert: -token[expert])[: shape.experts_per_token])
        return paddle.to_tensor(chosen).reshape([*where, shape.experts_per_token])

    def balance(self, share: Any) -> Any:
        """Balance loss, summed over rows, of the passes since it was last read. `share` [rows, samples]: 1 / (tokens
        of the row) for samples in that row, else 0."""
        uses, scores = (share @ paddle.concat(each) for each in zip(*self._seen, strict=True))
        self._seen.clear()
        return self._shape.experts * (uses * scores).sum()


class WithExperts:
    """Mixin for the adapter of the dense family with the same attention and norms."""

    def whole_model(self, shape: ModelShape, config: Any) -> Any:
        model = super().whole_model(shape, config)  # type: ignore[misc]
        for index, layer in enumerate(getattr(model, shape.traits.prefix).layers):
            if (kind := shape.of(index)).experts:
                put(layer, kind, MixtureLayer(kind, whole=True))
        return model

    def _fit(self, layer: Any, shape: ModelShape, config: Any) -> None:
        if shape.experts:
            put(layer, shape, MixtureLayer(shape, whole=False))
        super()._fit(layer, shape, config)  # type: ignore[misc]


def put(layer: Any, shape: ModelShape, mixture: MixtureLayer) -> None:
    """Replace the MLP of a PaddleNLP decoder layer."""
    assert shape.traits.mixture
    inside = shape.traits.mixture.inside
    if inside != "mlp" and "mlp" in layer._sub_layers:
        del layer.mlp
        object.__setattr__(layer, "mlp", lambda x: getattr(layer, inside)(x))
    setattr(layer, inside, mixture)
