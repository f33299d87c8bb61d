"""Multi-token prediction on one rank: packed rows and pieces of the loss, and mistakes that gradients show."""

from dataclasses import replace

import pytest

pytest.importorskip("paddle")

from paddlenlp_galvatron.check.parity import parity_worker
from paddlenlp_galvatron.check.parity.parity import Case, Parity, compare
from paddlenlp_galvatron.plan import VocabStrategy

from .plan_words import Named, having, plan


def case_of(family: str, **plan_fields: object) -> Case:
    case = Named("MTP", having(plan(1, "1 1"), "1 1"), family, mtp=True).case()
    return replace(case, plan=replace(case.plan, **plan_fields), packed=family == "glm4_moe")


def trained(case: Case, folder) -> Parity:
    parity_worker.run_case(case, folder, 0)
    return compare(folder, [case])[0]


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_one_rank_trains_as_one_process_does(family, pieces, tmp_path):
    assert trained(case_of(family, vocab=VocabStrategy(pieces=pieces)), tmp_path).agrees
