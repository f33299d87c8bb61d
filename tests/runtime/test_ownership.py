"""Which rank stores what: known without asking the others."""

from types import SimpleNamespace
from unittest.mock import patch

import pytest

pytest.importorskip("paddle")

import paddle
from distributed import plans
from random_cases import random_cases

from paddlenlp_galvatron.check.parity.parity import small_case
from paddlenlp_galvatron.model.families import FAMILIES
from paddlenlp_galvatron.runtime import units
from paddlenlp_galvatron.runtime.engine import Engine
from paddlenlp_galvatron.runtime.setup import ModelSetup
from paddlenlp_galvatron.runtime.weights import WHOLE, SeededWeights, ShardedParameter, zero_parameter
from paddlenlp_galvatron.training.checkpoint.loading import pieces_of


class NoGroups:
    """Communicators that carry no messages."""

    def __init__(self, rank):
        self.rank = rank

    def create(self, *_, **__):
        pass

    def get(self, ranks, use=""):
        if len(ranks) == 1:
            return None
        return SimpleNamespace(rank=ranks.index(self.rank), nranks=len(ranks), ranks=list(ranks))


def engine_of(case, rank):
    """A rank's engine, without the others."""
    runtime = "paddlenlp_galvatron.runtime"
    with (
        patch(f"{runtime}.engine.start_world", lambda: (rank, case.plan.world_size)),
        patch(f"{runtime}.engine.dist"),
        patch(f"{runtime}.units.all_gather_first", lambda part, group: paddle.concat([part] * group.nranks)),
        patch(f"{runtime}.weights.broadcast"),
    ):
        return Engine(ModelSetup.of(case.plan, case.shape, case.seq_length), groups=NoGroups(rank))


MIXTURES = [
    small_case(of.plan, of.family) for of in (*plans.EXPERTS_TWO, *plans.EXPERTS_FOUR) if FAMILIES[of.family].mixture
]


@pytest.mark.parametrize("cases", [*(random_cases(6, world, seed=3) for world in (2, 4, 6, 8)), MIXTURES])
def test_each_number_is_stored_by_the_lowest_rank_that_holds_it(cases):
    for case in cases:
        seen = []
        for rank in range(case.plan.world_size):
            for trainable in engine_of(case, rank).trainables:
                held = pieces_of(trainable)
                assert trainable.is_first_copy == (bool(held) and held not in seen), (case.plan, rank, held[:1])
                seen.append(held)


def test_whole_weights_stay_until_their_last_user_releases_them(monkeypatch):
    """A tied table under zero3 is used by embedding and LM head at once."""
    monkeypatch.setattr(
        units, "all_gather_start", lambda part, _: SimpleNamespace(wait=lambda: paddle.concat([part] * 2))
    )
    weight = ShardedParameter(
        "table", (4, 2), WHOLE, zero_parameter([4, 2], "float32"), None, 2, source=SeededWeights(0, 1)
    )
    unit = units.ShardedUnit([weight], SimpleNamespace(rank=0, nranks=2), every_micro_batch=False, keep_whole=False)
    unit.begin()
    held = []
    for use in (unit.gather, unit.gather, unit.release, unit.release):
        use()
        held.append(weight.tensor._is_initialized())
    assert held == [True, True, True, False]
