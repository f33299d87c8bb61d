"""Training as one writes it by hand for one strategy: PaddleNLP's layers in a loop, data parallel by an all-reduce."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from numpy.typing import NDArray

from paddlenlp_galvatron.plan import ModelShape, Plan
from paddlenlp_galvatron.runtime.adapters import load_family
from paddlenlp_galvatron.runtime.paddle_private import next_rate
from paddlenlp_galvatron.runtime.weights import WeightSource
from paddlenlp_galvatron.training.recipe import Recipe


class HandWritten:
    """Steps of a decoder of whole PaddleNLP layers. Gradients are all-reduced layer by layer after the backward."""

    def __init__(
        self,
        plan: Plan,
        shape: ModelShape,
        recipe: Recipe,
        batches: list[NDArray[np.int64]],
        source: WeightSource,
    ):
        family, seq_length = load_family(shape.family), plan.assumed.seq_length or 0
        config = family.config(shape, seq_length)
        self._embedding = paddle.nn.Embedding(shape.vocab_size, shape.hidden_size)
        self._blocks = paddle.nn.LayerList([family.decoder_layer(shape, config) for _ in range(shape.layers)])
        self._norm = family.final_norm(config)
        self._head = paddle.nn.Linear(shape.hidden_size, shape.vocab_size, bias_attr=False)
        modules = {
            f"{shape.traits.prefix}.embed_tokens": self._embedding,
            **{f"{shape.traits.prefix}.layers.{index}": block for index, block in enumerate(self._blocks)},
            f"{shape.traits.prefix}.norm": self._norm,
            "lm_head": self._head,
        }
        self._modules = [list(module.parameters()) for module in modules.values()]
        for prefix, module in modules.items():
            for name, weight in module.named_parameters():
                weight.set_value(source(f"{prefix}.{name}", tuple(weight.shape)))
        weights = [weight for module in self._modules for weight in module]
        clip = paddle.nn.ClipGradByGlobalNorm(recipe.max_grad_norm)
        self._optimizer = recipe.build(weights, [weight.name for weight in weights if weight.ndim > 1], clip)
        self._ranks, self._rank = dist.get_world_size(), dist.get_rank()
        self._micro_batches, self._batches = plan.micro_batches, iter(batches)
        lowest = paddle.full([seq_length, seq_length], paddle.finfo(paddle.float32).min)
        samples = plan.micro_batch // self._ranks
        self._mask = paddle.triu(lowest, diagonal=1).expand([samples, 1, seq_length, seq_length])
        self._losses: list[float] = []

    def step(self) -> None:
        batch = next(self._batches)
        tokens = batch[:, 1:].size
        total = paddle.zeros([1])
        for rows in batch.reshape([self._micro_batches, self._ranks, -1, batch.shape[1]])[:, self._rank]:
            loss = self._loss(paddle.to_tensor(rows[:, :-1]), paddle.to_tensor(rows[:, 1:])) / tokens
            loss.backward()
            total += loss.detach()
        if self._ranks > 1:
            self._all_reduce_gradients()
            dist.all_reduce(total)
        self._optimizer.step()
        next_rate(self._optimizer)
        self._optimizer.clear_grad(set_to_zero=False)
        self._losses.append(float(total))

    def _loss(self, ids: Any, labels: Any) -> Any:
        x = self._embedding(ids)
        for block in self._blocks:
            x = block(x, attention_mask=self._mask)
        logits = self._head(self._norm(x))
        return paddle.nn.functional.cross_entropy(logits, labels, reduction="sum")

    @paddle.no_grad()  # type: ignore[untyped-decorator]
    def _all_reduce_gradients(self) -> None:
        for weights in self._modules:
            joined = paddle.concat([weight.grad.flatten() for weight in weights])
            dist.all_reduce(joined)
            parts = paddle.split(joined, [weight.size for weight in weights]) if len(weights) > 1 else [joined]
            for weight, part in zip(weights, parts, strict=True):
                weight.grad = part.reshape(weight.shape)

    def losses(self) -> list[float]:
        return self._losses
