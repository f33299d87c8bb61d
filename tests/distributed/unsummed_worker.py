"""A rank of a parity check whose parts of ranks, in which ZeRO shards, do not sum their gradients up."""

from __future__ import annotations

from typing import Any

from paddlenlp_galvatron.check.parity import parity_worker
from paddlenlp_galvatron.runtime.groups import run_as_rank
from paddlenlp_galvatron.runtime.units import ShardedUnit

init = ShardedUnit.__init__


def alone(self: ShardedUnit, *rest: Any, **named: Any) -> None:
    init(self, *rest, **named)
    self._replicas = None


if __name__ == "__main__":
    ShardedUnit.__init__ = alone  # type: ignore[method-assign]
    run_as_rank(parity_worker.main)
