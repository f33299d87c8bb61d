"""The reference: the same training by PaddleNLP's whole model, optimizer and clipping, in one process without a
plan."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray
from paddlenlp.peft import LoRAConfig, LoRAModel
from paddlenlp.trl import DPOCriterion

from ...model.lora import Adapters, is_factor
from ...model.preference import BY_TOKEN, Preference
from ...model.shape import CHOICE_BIAS
from ...plan import ModelShape
from ...runtime.adapters import load_family
from ...runtime.adapters.mixture import MixtureLayer
from ...runtime.batch import IGNORED_LABEL, Batch, Samples, samples_of
from ...runtime.paddle_private import next_rate, take_over_hooks
from ...runtime.setup import MTP_WEIGHT
from ...runtime.weights import WeightSource
from ...training.recipe import Recipe

Gradients = dict[str, NDArray[np.float32]]  # keyed by PaddleNLP's weight names


def train_one_process(
    shape: ModelShape,
    seq_length: int,
    source: WeightSource,
    recipe: Recipe,
    batches: Iterable[Batch],
    adapters: Adapters | None = None,
    preference: Preference | None = None,
) -> Iterator[tuple[float, Gradients]]:
    """Loss (with the balance loss) and unclipped gradients of each global batch, updating the weights after each."""
    family = load_family(shape.family)
    model = family.whole_model(shape, family.config(shape, seq_length))
    weights = dict(model.named_parameters())
    predict = _Mtp(model, shape) if shape.mtp_layers else None
    if adapters:
        names = sorted({name.split(".")[-2] for kind in shape.kinds for name in kind.layer.projections})
        how = {"r": adapters.rank, "lora_alpha": adapters.alpha, "rslora": adapters.rslora, "dtype": "float32"}
        plain = dict(model.named_sublayers())
        model = LoRAModel(model, LoRAConfig(target_modules=[f".*{name}.*" for name in names], **how)).model
        for name, layer in model.named_sublayers():
            if name in plain and plain[name] is not layer:
                take_over_hooks(layer, plain[name])
        weights = dict(model.named_parameters())
    for name, weight in weights.items():
        weight.set_value(source(name, tuple(weight.shape)))
        weight.stop_gradient = adapters is not None and not is_factor(name)
    weights = {name: weight for name, weight in weights.items() if not weight.stop_gradient}
    decaying = [weight.name for weight in weights.values() if weight.ndim > 1]
    clip = paddle.nn.ClipGradByGlobalNorm(recipe.max_grad_norm)
    optimizer = recipe.build(list(weights.values()), decaying, clip)
    for batch in batches:
        rows = samples_of(batch)
        loss = _loss(model, rows) if preference is None else _pair_loss(model, batch, preference)
        if predict:
            loss = loss + MTP_WEIGHT * predict.loss(rows)
        if shape.router_aux_loss_coef:
            share = paddle.to_tensor(_share(rows))
            balances = [layer.balance(share) for layer in model.sublayers() if isinstance(layer, MixtureLayer)]
            loss = loss + shape.router_aux_loss_coef * sum(balances) / (shape.layers_with_experts * len(rows.ids))
        loss.backward()
        yield float(loss), {name: _gradient(name, weight) for name, weight in weights.items()}
        optimizer.step()
        next_rate(optimizer)
        optimizer.clear_grad()


def _whole_model(shape: ModelShape, seq_length: int) -> Any:
    family = load_family(shape.family)
    return family.whole_model(shape, family.config(shape, seq_length))


class _Mtp:
    """DeepSeek-V3's MTP (arXiv:2412.19437, section 2.2) on PaddleNLP's whole model. The main pass skips the last layer;
    `loss` calls it with the normed hidden states of the previous pass and the embeddings of the shifted tokens."""

    def __init__(self, model: Any, shape: ModelShape):
        self._model, self._inner = model, getattr(model, shape.traits.prefix)
        *_, previous, self._layer = self._inner.layers
        self._forward, self._layer.forward = self._layer.forward, lambda hidden, *_, **__: hidden
        self._calls: list[Any] = []  # further arguments of the layers, by pass
        self._normed: list[Any] = []
        previous.register_forward_pre_hook(lambda _, inputs: self._calls.append(inputs[1:]))
        self._inner.norm.register_forward_post_hook(lambda _layer, _inputs, normed: self._normed.append(normed))

    def loss(self, batch: Samples) -> Any:
        labelled, total = int((batch.labels != IGNORED_LABEL).sum()), 0.0
        for (ids, labels), arguments, hidden in zip(_documents(batch), self._calls, self._normed, strict=True):
            embedded = self._inner.embed_tokens(paddle.to_tensor(np.concatenate([ids[:, 1:], ids[:, -1:]], 1)))
            layer = self._layer
            both = paddle.concat([layer.enorm(embedded), layer.hnorm(hidden)], -1)
            out = self._forward(layer.eh_proj(both), *arguments)
            logits = self._model.lm_head(layer.shared_head.norm(out[0] if isinstance(out, tuple) else out))[:, :-1]
            total = total + _cross_entropy(logits, labels[:, 1:])
        for kept in (self._calls, self._normed):
            kept.clear()
        return total / labelled


def _gradient(name: str, weight: Any) -> NDArray[np.float32]:
    """Zero for the bias of a router's choice, which only selects experts and has no gradient."""
    gradient: NDArray[np.float32] = (
        np.zeros(weight.shape, np.float32) if name.endswith(CHOICE_BIAS) else weight.grad.numpy()
    )
    return gradient


def _loss(model: Any, batch: Samples) -> Any:
    """Mean over the tokens with a label, documents apart; Paddle's mean divides by all tokens."""
    labelled = int((batch.labels != IGNORED_LABEL).sum())
    return sum(_summed(model, ids, labels) for ids, labels in _documents(batch)) / labelled


def _pair_loss(model: Any, batch: Any, preference: Preference) -> Any:
    """PaddleNLP's criterion over all pairs, each answer alone; it takes means for losses that are defined with
    means."""
    settings = SimpleNamespace(**asdict(preference), loss_type=preference.loss, pref_loss_ratio=preference.ratio)
    config = SimpleNamespace(tensor_parallel_output=False, tensor_parallel_degree=1, dpo_config=settings)
    sums = paddle.stack(answer_sums(model, batch)).reshape([-1, 2])
    facts = batch.pairs.reshape([-1, 4])
    facts = paddle.to_tensor(facts[facts[:, 2] > 0])
    policy, reference, counts = sums, facts[:, :2], facts[:, 2:]
    if preference.loss in BY_TOKEN:
        policy, reference = policy / counts, reference / counts
    pairs = DPOCriterion(config, settings).dpo_loss(*policy.unbind(1), *reference.unbind(1))
    return pairs - preference.sft_ratio * sums[:, 0].sum() / counts[:, 0].sum()


def answers_of(shape: ModelShape, seq_length: int, source: WeightSource, batch: Any) -> NDArray[np.float32]:
    """`answer_sums` of a model without adapters."""
    model = _whole_model(shape, seq_length)
    for name, weight in model.named_parameters():
        weight.set_value(source(name, tuple(weight.shape)))
    with paddle.no_grad():
        sums: NDArray[np.float32] = paddle.stack(answer_sums(model, batch)).numpy()
    return sums


def answer_sums(model: Any, batch: Samples) -> list[Any]:
    """Log-probabilities of the answers, row by row, chosen before rejected."""
    sums = [(labels, -_summed(model, ids, labels)) for ids, labels in _documents(batch)]  # padding uses experts as well
    return [total for labels, total in sums if (labels != IGNORED_LABEL).any()]


def _documents(batch: Samples) -> Iterator[tuple[Any, Any]]:
    """Inputs and labels, each [samples, tokens]; all rows at once if each is one document."""
    if batch.ends is None:
        yield batch.ids, batch.labels
        return
    for ids, labels, ends in zip(batch.ids, batch.labels, batch.ends, strict=True):
        start = 0
        while start < len(ids):
            stop = int(ends[start])
            yield ids[None, start:stop], labels[None, start:stop]
            start = stop


def _share(batch: Samples) -> NDArray[np.float32]:
    """[rows, documents]: 1 / tokens of the row for documents in that row, else 0."""
    rows, tokens = batch.ids.shape
    documents = [1] * rows if batch.ends is None else [len(np.unique(ends)) for ends in batch.ends]
    return np.repeat(np.eye(rows, dtype=np.float32) / tokens, documents, axis=1)


def _summed(model: Any, ids: Any, labels: Any) -> Any:
    out = model(paddle.to_tensor(ids))
    return _cross_entropy(out[0] if isinstance(out, tuple) else out, labels)


def _cross_entropy(logits: Any, labels: Any) -> Any:
    return paddle.nn.functional.cross_entropy(
        logits.reshape([-1, logits.shape[-1]]),
        paddle.to_tensor(labels).flatten(),
        reduction="sum",
        ignore_index=IGNORED_LABEL,
    )
