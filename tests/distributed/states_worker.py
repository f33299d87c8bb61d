"""One rank: bytes that a plan's engine holds after each part of a step, and the calls of its pipeline and units."""

import gc
import json
import sys
from pathlib import Path
from typing import Any

import paddle

from paddlenlp_galvatron.check.parity.parity import Case, batch_of, read_cases
from paddlenlp_galvatron.runtime import device
from paddlenlp_galvatron.runtime.engine import Engine
from paddlenlp_galvatron.runtime.groups import Groups, run_as_rank, start_world
from paddlenlp_galvatron.runtime.setup import ModelSetup
from paddlenlp_galvatron.runtime.units import ShardedUnit

MIB = 2**20


class Watch:
    """Listens to an engine: passes in order, micro-batches in flight, whole weights of zero3 units and whole
    gradients in messages at once."""

    def __init__(self, engine: Engine):
        self.passes: list[tuple[str, int, int]] = []
        self.copies: list[str] = []
        self.in_flight = self.most_in_flight = self.most_gathered = 0
        self.most_sent = 0
        self._reducing = [u for u in engine.stage.units if isinstance(u, ShardedUnit)]
        self._sharded = [u for u in self._reducing if not u._keep_whole]
        stage, pipeline = engine.stage, engine._pipeline
        forward, backward = stage.forward, pipeline._backward

        def watched_forward(x: Any, ids: Any, labels: Any, chunk: int, *rest: Any) -> Any:
            self._passed("forward", chunk, +1)
            return forward(x, ids, labels, chunk, *rest)

        def watched_backward(out: Any, scale: float, position: int) -> Any:
            result = backward(out, scale, position)
            self._passed("backward", pipeline._next_schedule.passes[position].chunk, -1)
            return result

        stage.forward, pipeline._backward = watched_forward, watched_backward  # type: ignore[method-assign]
        for owner, name in ((paddle, "to_tensor"), (paddle.Tensor, "numpy"), (paddle.Tensor, "item")):
            self._count_copies(owner, name)
        for unit in self._sharded:
            self._listen(unit)
        for unit in self._reducing:
            self._count_messages(unit)

    def _passed(self, kind: str, chunk: int, change: int) -> None:
        self.passes.append((kind, chunk, sum(one[:2] == (kind, chunk) for one in self.passes)))
        self.in_flight += change
        self.most_in_flight = max(self.most_in_flight, self.in_flight)

    def _count_copies(self, owner: Any, name: str) -> None:
        """From the first pass to the last."""
        copy = getattr(owner, name)

        def watched(*args: Any, **options: Any) -> Any:
            if self.in_flight:
                self.copies.append(name)
            return copy(*args, **options)

        setattr(owner, name, watched)

    def _listen(self, unit: ShardedUnit) -> None:
        gather, prefetch = unit.gather, unit.prefetch

        def watched(action: Any) -> Any:
            def run() -> None:
                action()
                held = sum(u._flat is not None or u._flight is not None for u in self._sharded)
                self.most_gathered = max(self.most_gathered, held)

            return run

        unit.gather, unit.prefetch = watched(gather), watched(prefetch)  # type: ignore[method-assign]

    def _count_messages(self, unit: ShardedUnit) -> None:
        start = unit._start

        def watched() -> None:
            start()
            self.most_sent = max(self.most_sent, sum(bool(u._pending) for u in self._reducing))

        unit._start = watched  # type: ignore[method-assign]


def run_case(case: Case, folder: Path, index: int, groups: Groups) -> None:
    def held() -> float:
        gc.collect()
        return device.allocated_mib() * MIB

    empty = held()
    engine = Engine(ModelSetup.of(case.plan, case.shape, case.seq_length), groups=groups)
    weights = held()
    optimizer = case.recipe.build(engine.tensors, engine.decaying)
    moments = held() - weights
    engine.forward_backward(batch_of(case, 0))  # allocates lasting tensors, such as the attention mask
    for trainable in engine.trainables:
        trainable.drop_gradient()
    idle = held()
    engine.forward_backward(batch_of(case, 0))
    gradients = held() - idle
    engine.update(optimizer, 1.0)
    watch = Watch(engine)
    engine.forward_backward(batch_of(case, 1))
    report = {
        "drawn": paddle.rand([4]).tolist(), "weights": weights - empty, "gradients": gradients, "moments": moments,
        "passes": watch.passes, "copies": watch.copies, "most_in_flight": watch.most_in_flight,
        "most_gathered": watch.most_gathered, "most_sent": watch.most_sent,
    }  # fmt: skip
    (folder / f"{index}.{engine.rank}.json").write_text(json.dumps(report))


def main() -> None:
    folder, groups = Path(sys.argv[1]), Groups(start_world()[0])
    for index, case in enumerate(read_cases(folder)):
        run_case(case, folder, index, groups)


if __name__ == "__main__":
    run_as_rank(main)
