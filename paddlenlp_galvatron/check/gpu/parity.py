"""Parts that train small models under a plan and in one process: fourteen plans, and schedules that could hang."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ...base.scratch import scratch_folder
from ...launch.processes import LaunchError, launch
from ...plan import Precision
from ..parity.parity import TOLERANCES, WORKER, compare, write_cases
from .findings import TrialFinding, TrialSetting, TrialState
from .in_turn import in_turn
from .plans import ONE_RANK, Named, fused_loss_case, parity_cases, schedule_cases


def parity(setting: TrialSetting) -> Iterator[TrialFinding]:
    """Loss and every gradient of fourteen plans, fp32 (on GPUs without TF32) and bf16. A kernel that is off by default
    is told, and not judged."""
    for precision in (Precision.FP32, Precision.BF16):
        cases = parity_cases(setting.ranks, precision, setting.on_gpus)
        if setting.ranks == 1:
            yield setting.left_out(f"{len(cases) - len(ONE_RANK)} plans, {precision}", "they need 2 ranks or more")
            cases = [named for named in cases if named.name in ONE_RANK]
        cases = [Named(f"{named.name}, {precision}", named.case) for named in cases]
        asked = [fused_loss_case(setting.ranks, precision)] if setting.on_gpus and setting.ranks > 1 else []
        for finding in _tried(setting, [*cases, *asked]):
            judged = finding.state is TrialState.NO_TIME or finding.name not in {named.name for named in asked}
            told = f"{finding.state}: {finding.told}"
            yield finding if judged else replace(finding, state=TrialState.TOLD, told=told)
    if not setting.on_gpus:
        yield setting.left_out("flash attention, fused cross entropy", "Paddle has them on GPUs alone")


def schedules(setting: TrialSetting) -> Iterator[TrialFinding]:
    """Two steps and an evaluation of pipelines, whose ranks would wait for ever if one waited for the wrong thing."""
    if setting.ranks == 1:
        yield setting.left_out("pipelines", "they need 2 ranks or more")
        return
    if setting.ranks < 4:
        yield setting.left_out("stages of Ulysses, Megatron-SP and zero3", "they need 4 ranks or more")
    yield from _tried(setting, list(schedule_cases(setting.ranks)))


def _tried(setting: TrialSetting, cases: Sequence[Named]) -> Iterator[TrialFinding]:
    names = [named.name for named in cases]
    return in_turn(setting, names, lambda first, launch: _launched(setting, cases[first:], f"{launch}"))


def _launched(setting: TrialSetting, cases: Sequence[Named], log: str) -> tuple[list[TrialFinding], str]:
    """Findings of the cases that ended, in order, and the fault of the next one."""
    fault = ""
    with scratch_folder("galvatron-check-") as folder:
        write_cases(folder, [named.case for named in cases])
        logs = setting.folder / f"{cases[0].case.plan.assumed.mixed_precision}-{log}"
        try:
            launch(WORKER, [str(folder)], setting.ranks, logs, setting.launch_s, device=setting.device)
        except LaunchError as error:
            fault = str(error)
        ranks = range(setting.ranks)
        ended = [all((folder / f"{index}.{rank}.json").exists() for rank in ranks) for index in range(len(cases))]
        count = ended.index(False) if False in ended else len(cases)
        results = compare(folder, [named.case for named in cases[:count]])
    done = []
    for named, result in zip(cases, results, strict=False):
        loss, gradient = TOLERANCES[result.precision]
        figure = (
            f"loss {result.max_loss_diff:.1e} of {loss:.0e}, gradient {result.max_grad_rel_diff:.1e} of {gradient:.0e}"
        )
        done.append(setting.found(named.name, result.agrees, figure))
    return done, fault or ("" if count == len(cases) else "its ranks left no result")
