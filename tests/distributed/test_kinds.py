"""Models of dense layers and layers with experts train as in one process, for any stages of the layers."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("paddle")

from paddlenlp_galvatron.check.parity.parity import compare, small_case
from paddlenlp_galvatron.check.parity.parity_worker import run_case
from paddlenlp_galvatron.model import ModelShape

from . import plans
from .test_experts import cases
from .test_families import disagreements


def test_kinds_of_two_processes():
    assert not disagreements(cases(plans.KINDS_TWO))


def test_kinds_of_four_processes():
    packed = [replace(case, packed=True) for case in cases(plans.KINDS_FOUR[1:2])]
    assert not disagreements([*cases(plans.KINDS_FOUR), *packed])


@pytest.mark.slow
@pytest.mark.parametrize("named", [plans.KINDS_SIX, plans.KINDS_EIGHT], ids=["6 ranks", "8 ranks"])
def test_kinds_of_more_processes(named):
    assert not disagreements(cases(named))


def test_a_balance_loss_that_counts_dense_layers_is_another_one(tmp_path):
    case = small_case(plans.plan(1, "1 1 1"), "qwen2_moe", steps=1, dense_layers=(0,))
    for folder, agrees in ((tmp_path / "right", True), (tmp_path / "wrong", False)):
        folder.mkdir()
        with pytest.MonkeyPatch.context() as patch:
            if not agrees:
                patch.setattr(ModelShape, "layers_with_experts", property(lambda shape: shape.layers))
            run_case(case, folder, 0)
        [found] = compare(folder, [case])
        assert (found.max_grad_rel_diff <= found.limits[1]) is agrees, found
