"""Every kind of layer-wise plan trains as one process does: losses and each gradient, on real processes."""

from __future__ import annotations

import pytest

pytest.importorskip("paddle")

from paddlenlp_galvatron.check.parity import parity
from paddlenlp_galvatron.check.parity.parity import check_parity, small_case
from paddlenlp_galvatron.launch.processes import launch

from . import plans
from .test_deferred import SOME
from .test_families import QUICK

# Plans that other tests train: under a stricter backend, or with richer families.
ELSEWHERE = {named.name for named in SOME}.union(*QUICK.values())


@pytest.mark.parametrize(
    "whole", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["few steps", "every plan, four steps"]
)
@pytest.mark.parametrize(
    "cases",
    [
        [*plans.TWO, *plans.INTERLEAVED_TWO, *plans.PARTS_TWO],
        [*plans.FOUR, *plans.ZERO, *plans.HYBRID_FOUR, *plans.INTERLEAVED_FOUR],
        [*plans.PARTS_FOUR, *plans.CONTEXT_FOUR],
        plans.SIX,
        [*plans.EIGHT, *plans.HYBRID_EIGHT, *plans.INTERLEAVED_EIGHT, *plans.CONTEXT_EIGHT],
    ],
    ids=["2 ranks", "4 ranks", "4 ranks, parts and context", "6 ranks", "8 ranks"],
)
def test_plans_train_as_one_process_does(cases, whole):
    def small(case: plans.Named) -> parity.Case:
        steps = 4 if whole else plans.ENOUGH[case.optimizer]
        return small_case(case.plan, case.family, case.optimizer, steps, tied=case.tied, kv_heads=case.kv_heads)

    cases = [case for case in cases if whole or not (case.again or case.name in ELSEWHERE)]
    results = check_parity([small(case) for case in cases], timeout_s=600)
    wrong = [
        f"{case.name}: loss {result.max_loss_diff:.1e}, gradient {result.max_grad_rel_diff:.1e} {result.worst_gradient}"
        for case, result in zip(cases, results, strict=True)
        if not result.agrees
    ]
    assert not wrong, "\n".join(wrong)


def test_a_plan_has_a_name_of_its_own():
    """A mark of plans that another test trains."""
    names = [case.name for found in vars(plans).values() if isinstance(found, list) for case in found]
    assert len(names) == len(set(names)) and set(names) >= ELSEWHERE


def test_the_check_sees_parts_that_are_not_summed_up(tmp_path):
    """By gradients: ZeRO in a part of the ranks has no other sign of it, as all copies are equally wrong."""
    case = small_case(plans.HYBRID_FOUR[0].plan, "qwen2", steps=1)
    parity.write_cases(tmp_path, [case])
    launch(f"{__package__}.unsummed_worker", [str(tmp_path)], 4, tmp_path / "log", timeout_s=300)
    [result] = parity.compare(tmp_path, [case])
    assert result.max_loss_diff < 1e-5 and result.max_grad_rel_diff > 0.1 and not result.agrees


def test_the_check_sees_a_gradient_that_is_off_by_a_thousandth(monkeypatch):
    case = small_case(plans.plan(1, "1 1"), "llama", steps=1)
    losses, gradients = parity._one_process(parity._data_only(case))
    name = "llama.layers.1.mlp.up_proj.weight"
    tampered = [{**gradients[0], name: gradients[0][name] * 1.001}]
    monkeypatch.setattr(parity, "_one_process", lambda _: (losses, tampered))
    [result] = check_parity([case])
    assert result.worst_gradient.startswith(name)
    assert result.max_grad_rel_diff == pytest.approx(1e-3, rel=0.05)
