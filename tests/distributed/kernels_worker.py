"""One rank of a parity check as on a GPU: with every fused kernel, by twins of those that a CPU has not.

Words: `twins` and the worker's folder; `nan` and a folder of cases, whose second step has a token of NaN and whose
third has no others; or `loss`, a folder and a number of stages: the fused loss's own operator.
"""

import json
import os
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from unittest import mock

import paddle
from paddle.nn import functional

from paddlenlp_galvatron.base.errors import GalvatronError
from paddlenlp_galvatron.check.parity import parity_worker
from paddlenlp_galvatron.check.parity.parity import batch_of, read_cases, small_case
from paddlenlp_galvatron.options.uniform import uniform_plan
from paddlenlp_galvatron.runtime import experts, grouped, kernels
from paddlenlp_galvatron.runtime.adapters.decoder import Adapter
from paddlenlp_galvatron.runtime.engine import Engine
from paddlenlp_galvatron.runtime.groups import Groups, run_as_rank, start_world
from paddlenlp_galvatron.runtime.kernels import Kernels
from paddlenlp_galvatron.runtime.paddle_private import MultiTensorAdamW
from paddlenlp_galvatron.runtime.setup import ModelSetup
from paddlenlp_galvatron.training.recipe import NonFiniteGuard

ALIGNED = 16  # bytes: the optimizer's kernel loads four numbers at a time


def train_by_twins(folder: str) -> None:
    import twins

    twins.install()
    Kernels.of = classmethod(lambda cls, _: cls(True, True, True, True))
    Kernels.require_version, kernels.lacks = lambda *_: None, lambda _: False  # twins run on any version and processor
    grouped.has_kernel = lambda dtype: grouped.paddle_private.batched_gemm is not None
    linear, update, decoder_layer = functional.linear, MultiTensorAdamW._update, Adapter.decoder_layer

    def as_on_gpus(*arguments, **named):
        with mock.patch.object(paddle, "is_compiled_with_cuda", lambda: True):
            return linear(*arguments, **named)

    def aligned(self, tensors, gradients, decay):
        for tensor in (*tensors, *gradients):
            assert tensor.data_ptr() % ALIGNED == 0, f"{tensor.shape} begins at {tensor.data_ptr() % ALIGNED}"
        update(self, tensors, gradients, decay)

    def with_rope(self, shape, config):
        layer = decoder_layer(self, shape, config)
        layer.self_attn.use_fused_rope = True  # which PaddleNLP switches off where it sees no GPU
        return layer

    functional.linear, MultiTensorAdamW._update = as_on_gpus, aligned
    Adapter.decoder_layer = with_rope
    paddle.optimizer.AdamW = MultiTensorAdamW
    sys.argv[1:] = [folder]
    parity_worker.main()
    (Path(folder) / f"calls.{os.environ['PADDLE_TRAINER_ID']}").write_text(json.dumps(twins.calls))


def train_with_nan(folder: str) -> None:
    import twins

    twins.install()
    score, choose, results, groups = experts.score, experts.choose, [], Groups(start_world()[0])
    for case in read_cases(Path(folder)):
        engine = Engine(ModelSetup.of(case.plan, case.shape, case.seq_length), groups=groups)
        optimizer = case.recipe.build(engine.tensors, engine.decaying)
        norms, sentences, chosen = [], [], [0] * case.shape.experts
        for step in range(4):
            poisoned = {1: slice(0, 1 - engine.rank), 2: slice(None)}.get(step, slice(0))  # tokens

            def scored(logits, shape, poisoned=poisoned):
                logits[poisoned] = float("nan")
                return score(logits, shape)

            def counted(scores, bias, shape, chosen=chosen, step=step):
                numbers = choose(scores, bias, shape)
                for expert in numbers.flatten().tolist() if step == 2 else ():
                    chosen[expert] += 1
                return numbers

            experts.score, experts.choose = scored, counted
            loss = engine.forward_backward(batch_of(case, step))
            norms.append(engine.update(optimizer, 1.0))
            try:
                NonFiniteGuard(may_skip=False, max_skipped=9, scaled=False).count(step + 1, loss, norms[-1])
            except GalvatronError as error:
                sentences.append(str(error))
        results.append((norms, sentences[0], chosen))
    (Path(folder) / f"{engine.rank}.json").write_text(json.dumps(results))


def sockets() -> set[str]:
    found = set()
    for file in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the folder's own, by now closed
            found.add(str(file.readlink()))
    return {name for name in found if name.startswith("socket:")}


def run_the_real_loss(folder: str, stages: str) -> None:
    Kernels.of = classmethod(lambda cls, _: cls(fused_cross_entropy=True))
    degree = int(os.environ["PADDLE_TRAINERS_NUM"]) // int(stages)
    plan = uniform_plan(
        layers=int(stages),
        world_size=degree * int(stages),
        global_train_batch_size=2,
        pp_deg=int(stages),
        global_tp_deg=degree,
        vocab_tp=degree,
    )
    case = small_case(plan, "llama")
    shape = replace(case.shape, vocab_size=256)
    engine = Engine(ModelSetup.of(case.plan, shape, case.seq_length))
    before, stated = sockets(), "not called"
    if engine.stage.is_last:
        try:
            tokens = case.plan.micro_batch * case.seq_length
            held = tokens // degree if case.plan.assumed.sequence_parallel else tokens
            engine.stage._head.loss(paddle.randn([held, shape.hidden_size]), paddle.zeros([tokens], "int64"))
            stated = "no refusal"
        except RuntimeError as error:
            stated = str(error)
    reported = {"new": sorted(sockets() - before), "printed": stated}
    (Path(folder) / f"{engine.rank}.json").write_text(json.dumps(reported))


if __name__ == "__main__":
    what, *words = sys.argv[1:]
    run_as_rank(lambda: {"twins": train_by_twins, "nan": train_with_nan, "loss": run_the_real_loss}[what](*words))
