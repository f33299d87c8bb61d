"""`galvatron validate` on the example of `search`; its ranks are not started, and every step takes about 0.1 s."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from paddlenlp_galvatron.check.validation import validate
from paddlenlp_galvatron.check.validation.accuracy import TERMS
from paddlenlp_galvatron.check.validation.validate import Validation
from paddlenlp_galvatron.check.validation.work import Step, Visit, visit_of
from paddlenlp_galvatron.plan import plan_to_dict

from . import search
from .row import Row, Seen, Values


def prepare(folder: Path) -> None:
    search.prepare(folder)
    (folder / "validate.json").write_text(json.dumps({"count": 2}))


class ValidateSeen(Seen):
    @classmethod
    @contextmanager
    def watched(cls) -> Iterator[dict[str, Any]]:
        calls: dict[str, Any] = {}
        cost, journal = validate._cost, Validation._journal

        def priced(options: Any, *others: Any) -> Any:
            calls["nodes"] = str(options.nodes)
            return cost(options, *others)

        def opened(self: Validation, fresh: bool = False) -> Any:
            calls["fresh"] = calls.get("fresh") or fresh
            return journal(self, fresh)

        def launched(self: Validation, seconds: float, begun: list[int], report: Any) -> None:
            calls["plans"] = [plan_to_dict(plan) for plan in self.kinds]
            calls["seconds"], calls["steps"] = round(seconds, -1), self.options.steps
            calls["visits"] = self.options.visits
            for number, plan in enumerate(self.kinds):
                ranks = (dict.fromkeys(TERMS, 1.0),) * plan.world_size
                step = Step(seconds=0.1 + 0.01 * (number % 3), terms_ms=ranks)
                visit = Visit(steps=(step,), peaks_mib=(1e6,) * plan.world_size)
                self._journal().get(visit_of(plan, 0), visit.model_dump)

        patched = patch.multiple(Validation, _journal=opened, _launch=launched)
        with patch.object(validate, "_cost", priced), patched:
            yield calls


TABLES = {
    "validate": {
        "config": Row("validate.json", "calls.plans", {"count": None}),
        "json": Row(1, "out"),
        "model_size": Row("model.json", "refusal"),
        "profiles": Row("other", "out"),
        "output": Row("mine", "files"),
        "num_nodes": Row(2, "calls.nodes"),
        "nproc": Row(4, "calls.plans"),
        "node_rank": Row(1, "calls.nodes"),
        "master_addr": Row("10.0.0.1", "calls.nodes"),
        "master_port": Row(4000, "calls.nodes"),
        "count": Row(4, "calls.plans"),
        "seed": Row(1, "calls.plans"),
        "plans": Row("plan.json", "calls.plans"),
        "budgets": Row(1, "calls.plans"),
        "global_train_batch_size": Row(16, "calls.plans"),
        "seq_length": Row(search.BASE["seq_length"], "calls.plans"),
        "sequence_parallel": Row(0, "calls.plans"),
        "mixed_precision": Row("bf16", "calls.plans"),
        "no_async_grad_reduce": Row(1, "calls.plans"),
        "task": Row("lora", "out"),
        "lora_rank": Row(64, "out", {"task": "lora"}),
        "visits": Row(2, "calls.visits"),
        "steps": Row(7, "calls.steps"),
        "minutes": Row(20, "calls.seconds"),
        "fresh": Row(1, "calls.fresh"),
        "most_mean_error": Row(1e-6, "err"),
        "least_tau": Row(0.999, "err"),
        "most_memory_error": Row(1e-6, "err"),
    }
}
BASES: dict[str, Values] = {
    "validate": {
        "MODEL": "example.json",
        "num_nodes": 2,
        "nproc": 4,
        "master_addr": "10.0.0.2",
        "master_port": 4001,
        "count": 6,
        "seq_length": search.BASE["seq_length"],
        "mixed_precision": "bf16",
    }
}
SEEN = ValidateSeen
