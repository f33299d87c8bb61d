"""`galvatron gpu-check`: its parts, how it continues after a failure, and that it runs on CPU processes."""

import json
import os
import shutil
import tarfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cost_examples import MODEL, example_plan, one_node

pytest.importorskip("paddle")

import paddle
from distributed import twins

from paddlenlp_galvatron.base.errors import GalvatronError
from paddlenlp_galvatron.base.text import gib
from paddlenlp_galvatron.base.writing import locked
from paddlenlp_galvatron.check.findings import EXIT_CODES, Finding, State
from paddlenlp_galvatron.check.gpu import faults, kernels, parity, prediction, run
from paddlenlp_galvatron.check.gpu.parity import ONE_RANK, fused_loss_case, parity_cases, schedule_cases
from paddlenlp_galvatron.check.gpu.setting import CUT_SHORT_S, CheckSetting
from paddlenlp_galvatron.check.parity.parity import Parity
from paddlenlp_galvatron.check.validation.accuracy import TERMS
from paddlenlp_galvatron.check.validation.work import Step, Visit
from paddlenlp_galvatron.cost_model.traffic import step_traffic_bytes
from paddlenlp_galvatron.launch.processes import LaunchError
from paddlenlp_galvatron.model import TRAINED
from paddlenlp_galvatron.model.layer import MODULES
from paddlenlp_galvatron.plan import DataParallel, LayerStrategy, Precision, Recompute, Schedule
from paddlenlp_galvatron.plan.mesh import Axis
from paddlenlp_galvatron.profiles import reserve
from paddlenlp_galvatron.runtime import attention
from paddlenlp_galvatron.runtime.kernels import Kernels

LAUNCH = "paddlenlp_galvatron.check.gpu.setting.launch"


def setting(folder: Path, part: str = "parity", ranks: int = 2, seconds: float = 60.0) -> CheckSetting:
    return CheckSetting(part, ranks, "cpu", folder, time.monotonic() + seconds)


@pytest.mark.parametrize("ranks", [1, 2, 4, 6, 8])
def test_sixteen_plans_try_every_way_to_split(ranks):
    cases = parity_cases(ranks, Precision.BF16, on_gpus=True)
    assert len({named.name for named in cases}) == 16
    assert {named.name for named in cases} >= set(ONE_RANK)
    plans = [named.case.plan for named in cases]
    assert all(plan.assumed.mixed_precision is Precision.BF16 for plan in plans)
    flash = {named.name for named in cases if named.case.plan.assumed.flash_attention}
    assert flash and flash & set(ONE_RANK) and len(flash) < len(cases)
    assert not any(n.case.plan.assumed.flash_attention for n in parity_cases(ranks, Precision.BF16, on_gpus=False))
    layers = [layer for plan in plans for layer in plan.layers]
    assert {part for layer in layers for part in layer.recompute} == set(Recompute) - set(MODULES)
    if ranks > 1:
        assert {plan.schedule for plan in plans} == set(Schedule) and any(len(plan.stages) > 1 for plan in plans)
        assert any(layer.ulysses for layer in layers) and any(layer.context > 1 for layer in layers)
        assert ranks in {layer.degree for layer in layers}
        assert {layer.dp_type for layer in layers} == set(DataParallel)
    if ranks > 2:
        [mixture] = [named.case for named in cases if named.case.shape.family == "qwen3_moe"]
        assert mixture.plan.pipeline == 2 and any(layer.ep > 1 for layer in mixture.plan.layers)
        assert mixture.plan.stages[0] == 1 and mixture.shape.dense_layers == (0,)  # a stage without experts
        assert not all(layer.consecutive for layer in layers)


@pytest.mark.parametrize("ranks", [4, 8])
def test_every_option_of_a_plan_and_every_family_occurs(ranks):
    """Else a new one would be launched on GPUs first in a user's training."""
    named = [each for precision in Precision for each in parity_cases(ranks, precision, on_gpus=True)]
    cases = [each.case for each in (*named, *schedule_cases(ranks))]
    axes = {Axis.PIPELINE} if any(case.plan.pipeline > 1 for case in cases) else set()
    for case in cases:
        size = ranks // case.plan.pipeline
        for layer in case.plan.layers:
            meshes = [layer.mesh(size), layer.experts.mesh(size)]
            meshes += [layer.mesh(size).parted(layer.sharding)] if layer.sharding else []
            axes |= {axis for mesh in meshes for axis, degree in mesh.axes if degree > 1}
            axes |= {Axis.COPIES} if layer.tp > case.shape.kv_heads else set()
    assert axes == set(Axis)
    assumed = [case.plan.assumed for case in cases]
    by_default = Kernels.__match_args__[:-1]  # the last one has a case of its own
    assert all(any(getattr(each, name) for each in assumed) for name in by_default)
    assert {part for case in cases for layer in case.plan.layers for part in layer.recompute} == set(Recompute) - set(
        MODULES
    )
    assert {case.shape.family for case in cases} == set(TRAINED)
    assert any(case.plan.vocab.pieces > 1 for case in cases) and any(case.packed for case in cases)
    of_experts = [case.shape for case in cases if case.shape.experts]
    assert any(shape.shared_size for shape in of_experts) and any(shape.expert_groups > 1 for shape in of_experts)
    assert {bool(shape.traits.mixture.sigmoid) for shape in of_experts} == {False, True}
    assert any(shape.latents and shape.latents.q_lora_rank for shape in of_experts)
    assert {case.plan.schedule for case in cases} == set(Schedule) and any(case.plan.chunks > 1 for case in cases)
    assert {layer.dp_type for case in cases for layer in case.plan.layers} == set(DataParallel)


@pytest.mark.parametrize("ranks", [1, 2, 4, 6, 8])
def test_one_plan_is_as_models_are_trained(ranks):
    """AdamW, and a split vocabulary that no column pads, which the one kernel of the loss needs: in the last stage."""
    cases = {named.name: named.case for named in parity_cases(ranks, Precision.BF16, on_gpus=True)}
    case = cases["split vocabulary, AdamW"]
    assert case.optimizer == "adamw" and case.shape.vocab_size % case.plan.vocab.degree == 0
    assert (case.plan.vocab.tp > 1) == (ranks > 1) and case.plan.pipeline == (2 if ranks > 2 else 1)
    fused = fused_loss_case(ranks, Precision.BF16).case
    assert fused.plan.assumed.fused_cross_entropy and fused.plan.vocab == case.plan.vocab
    others = [other for other in cases.values() if other.optimizer != "adamw" and other.plan.vocab.tp > 1]
    assert all(other.shape.vocab_size % other.plan.vocab.degree for other in others)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_schedules_are_those_that_once_hung(ranks):
    assert {named.case.steps for named in schedule_cases(ranks)} == {2}  # the first goes one micro-batch at a time
    cases = [named.case.plan for named in schedule_cases(ranks)]
    for schedule in Schedule:
        twos = {plan.micro_batches for plan in cases if plan.schedule is schedule and plan.stages == (1, 1)}
        assert twos >= {1, 2, 3, 4, 8}
    assert max(plan.pipeline for plan in cases) == ranks
    assert {plan.pipeline for plan in cases if plan.chunks > 1} == {plan.pipeline for plan in cases}
    pipelined = [layer for plan in cases if len(plan.stages) > 1 for layer in plan.layers]
    assert any(layer.ulysses for layer in pipelined) == (ranks >= 4)


def test_a_case_that_hangs_is_named_and_those_behind_it_are_tried(tmp_path, monkeypatch):
    cases = parity_cases(2, Precision.FP32, on_gpus=False)[:4]
    launches = []

    def launch(worker, words, ranks, logs, timeout_s, device, variables):
        folder, first = words
        count = len(json.loads(Path(folder, "cases.json").read_text()))
        launches.append(int(first))
        hangs = len(launches) == 1
        for index in range(int(first), 1 if hangs else count):
            for rank in range(ranks):
                Path(words[0], f"{index}.{rank}.json").write_text("{}")
        if hangs:
            Path(words[0], "1.0.json").write_text("{}")  # of one rank alone
            raise LaunchError("rank 1 is late, in a message")

    monkeypatch.setattr(LAUNCH, launch)
    good = Parity(0.0, 0.0, "", [], [], [], 0.0)
    monkeypatch.setattr(parity, "compare_case", lambda folder, case, index: good)
    found = list(parity._tried(setting(tmp_path), cases))
    assert launches == [0, 2]
    assert [finding.subject for finding in found] == [named.name for named in cases]
    assert [finding.state for finding in found] == [State.OK, State.FAILED, State.OK, State.OK]
    assert found[1].found == "rank 1 is late, in a message"
    late = list(parity._tried(setting(tmp_path, seconds=0), cases))
    assert {finding.state for finding in late} == {State.NO_TIME}


def test_a_launch_that_was_only_cut_short_has_not_failed(tmp_path):
    over, going_on = setting(tmp_path, seconds=-1), setting(tmp_path)
    assert over.ended("x", "rank 1 is late", given_s=30).state is State.NO_TIME
    assert over.ended("x", "rank 1 is late", given_s=CUT_SHORT_S).state is State.FAILED
    assert going_on.ended("x", "rank 1 was killed", given_s=30).state is State.FAILED


def test_one_part_keeps_no_other_from_running_and_all_is_packed(tmp_path, monkeypatch):
    def part(*steps):
        def tried(of):
            for step in steps:
                if isinstance(step, Exception):
                    raise step
                yield of.found("one", step, "a figure")

        return run.Timed(tried, 0.5, every_world=steps == (True,))

    parts = {
        "good": part(True),
        "bad": part(True, False),
        "ended": part(True, GalvatronError("rank 0 ended")),
        "broken": part(RuntimeError("of Paddle")),
    }
    monkeypatch.setattr(run, "PARTS", parts)
    folder = tmp_path / "out"
    found = list(run.check([*parts], 8, "cpu", folder, 60.0))
    states = Counter((finding.part, finding.state) for finding in found)
    assert states == {
        ("good", State.OK): 2, ("bad", State.OK): 1, ("bad", State.FAILED): 1,
        ("ended", State.OK): 1, ("ended", State.FAILED): 1, ("broken", State.FAILED): 1,
    }  # fmt: skip
    assert [finding.ranks for finding in found] == [2, 8, 8, 8, 8, 8, 8]
    assert {finding.found for finding in found} >= {"rank 0 ended", "RuntimeError: of Paddle"}
    assert run.write_result(folder, "cpu", found) == "failed"
    (folder / "bad" / "checkpoints").mkdir()
    with tarfile.open(run.bundle(folder)) as archive:
        names = archive.getnames()
    assert {"out/result.json", "out/machine.json", "out/broken/8-ranks/error.txt"} <= set(names)
    assert not any("checkpoints" in name for name in names)
    machine = json.loads((folder / "machine.json").read_text())
    assert machine["versions"]["numpy"] and machine["doctor"]
    late = list(run.check(["good"], 2, "cpu", folder, 1.0))
    assert [finding.state for finding in late] == [State.NO_TIME]


@pytest.mark.parametrize(
    ("states", "outcome"),
    [
        ((State.OK, State.INFO, State.SKIPPED), "ok"),
        ((State.OK, State.NO_TIME), "incomplete"),
        ((State.FAILED, State.NO_TIME), "failed"),
    ],
)
def test_what_had_no_time_is_not_ok(tmp_path, monkeypatch, galvatron, states, outcome):
    def part(of):
        yield from (replace(of.found("x", True, ""), state=state) for state in states)

    monkeypatch.setattr(run, "PARTS", {"parity": run.Timed(part, 0.5)})
    ran = galvatron("gpu-check", "--parts", "parity", "--output", tmp_path / "out")
    assert ran.code == EXIT_CODES[outcome] == {"ok": 0, "failed": 1, "incomplete": 4}[outcome]
    assert ran.out.splitlines()[-1].startswith(outcome)
    assert json.loads((tmp_path / "out" / run.RESULT).read_text())["result"] == outcome


def test_a_kernel_that_is_off_by_default_is_reported_and_not_judged(tmp_path, monkeypatch):
    of = replace(setting(tmp_path), device="gpu")
    monkeypatch.setattr(parity, "_tried", lambda of, cases: [of.found(case.name, False, "off") for case in cases])
    reported = {f.subject: f.found for f in parity.parity(of) if f.state is State.INFO}
    assert reported == {f"fused cross entropy, {precision}": "failed: off" for precision in ("fp32", "bf16")}


def test_one_rank_says_what_it_leaves_out(tmp_path, monkeypatch):
    monkeypatch.setattr(parity, "_tried", lambda of, cases: [of.found(named.name, True, "") for named in cases])
    found = [*parity.parity(setting(tmp_path, ranks=1)), *parity.schedules(setting(tmp_path, ranks=1))]
    assert Counter(finding.state for finding in found) == {State.OK: 2 * len(ONE_RANK), State.SKIPPED: 4}
    assert all("2 ranks" in f.found or "GPUs" in f.found for f in found if f.state is State.SKIPPED)
    monkeypatch.setattr(prediction, "_compared", lambda of, name, *_: of.found(name, None, ""))
    reported = [(finding.subject, finding.state) for finding in prediction.stock(setting(tmp_path, "stock", ranks=1))]
    left_out = "tensor parallel and two stages", State.SKIPPED
    assert reported == [("one rank", State.INFO), left_out]
    monkeypatch.setattr(prediction, "BENCHMARKS", tmp_path / "missing")
    [finding] = prediction.stock(setting(tmp_path))
    assert finding.state is State.SKIPPED and "checkout" in finding.found


def taken(plan, predicted, slower: float = 1.0, more_mib: float = 0.0, more_bytes: int = 0) -> Visit:
    """A visit of a plan that is as predicted, but for this."""
    tensors = [stage.memory.total_mib - stage.memory.context_mib for stage in predicted.stages]
    step = Step(seconds=predicted.time_s * slower, terms_ms=(dict.fromkeys(TERMS, 1.0),) * plan.world_size)
    return Visit(
        steps=(step,),
        peaks_mib=tuple(tensors[rank // plan.stage_size] + more_mib for rank in range(plan.world_size)),
        reserved_mib=(0.0,) * plan.world_size,
        bytes=dict(Counter(step_traffic_bytes(plan, MODEL)) + Counter(all_reduce=more_bytes)),
    )


@pytest.mark.parametrize(
    ("device", "change", "failed"),
    [
        ("gpu", {}, set()),
        ("gpu", {"slower": 1.5}, set()),  # no figure of a GPU says yet how near it should be
        ("cpu", {"more_mib": 1e4}, {"memory"}),
        ("gpu", {"more_bytes": 4}, {"bytes"}),
    ],
)
def test_what_is_not_as_predicted_fails(tmp_path, device, change, failed):
    costs = one_node()
    plan = example_plan(costs, stages=(2, 2), layers=(LayerStrategy(2),) * 4, micro_batches=4)
    of = replace(setting(tmp_path, "prediction", 8), device=device)
    found = list(prediction._compare(of, "x", plan, costs, taken(plan, costs.predict(plan), **change)))
    assert {word for f in found if f.state is State.FAILED for word in failed if word in f.subject} == failed
    assert bool(failed) == any(f.state is State.FAILED for f in found)
    assert [f.subject for f in found] == ["x: step", "x: memory of stage 0", "x: memory of stage 1", "x: bytes"]
    assert found[0].state is State.INFO and " GiB, allocated " in found[1].found


def test_a_rank_that_does_not_run_out_fails_the_part(tmp_path, monkeypatch):
    monkeypatch.setattr(LAUNCH, lambda *_, **__: None)
    [finding] = faults.memory(setting(tmp_path))
    assert finding.state is State.FAILED


def test_a_trace_that_lacks_a_pass_fails_the_part(tmp_path, monkeypatch):
    def launch(*_):
        for rank, passes in enumerate((8, 7)):
            (tmp_path / f"{rank}.json").write_text(json.dumps(passes * [{"cat": "forward"}]))

    monkeypatch.setattr(faults, "_launch", launch)
    assert [finding.state for finding in faults.later(setting(tmp_path))] == [State.FAILED] * 2


def test_a_kernel_that_ends_its_process_is_named_and_those_behind_it_are_tried(tmp_path, monkeypatch):
    def launch(worker, words, *_, **__):
        folder, first = Path(words[0]), int(words[1])
        for number in range(first, 2 if first == 0 else len(kernels.NAMES)):
            off = 1.0 if number == 4 else 0.0
            reported = (
                {"off": off, "worst": "gradient 1", "type": "bfloat16", "tolerance": 0.02}
                if number != 5
                else {"missing": "no kernel"}
            )
            (folder / f"{number}.json").write_text(json.dumps(reported))
        if first == 0:
            raise LaunchError("rank 0: misaligned address")

    monkeypatch.setattr(LAUNCH, launch)
    found = list(kernels.kernels(setting(tmp_path, "kernels", 1)))
    assert [finding.subject for finding in found] == list(kernels.NAMES)
    states = {kernels.NAMES[2]: State.FAILED, kernels.NAMES[4]: State.FAILED}
    states |= {kernels.NAMES[5]: State.SKIPPED}
    assert [f.state for f in found] == [states.get(name, State.OK) for name in kernels.NAMES]
    assert found[2].found == "rank 0: misaligned address" and "gradient 1 off by 1.0e+00" in found[4].found


def attend(query, key, value, rows, causal):
    """Stands for flash attention and flashmask."""
    if rows is None:
        return twins.flash_attn(query, key, value, None, None, 0.0, causal)[0]
    return twins.flashmask_attention(query, key, value, rows, None, 0.0, causal)[0]


def turned(query, key, _value, sin, cos, use_neox_rotary_style):
    """Stands for the rotary kernel, as it is documented for this style."""
    assert not use_neox_rotary_style
    half = query.shape[-1] // 2
    swapped = [paddle.concat([-x[..., half:], x[..., :half]], -1) for x in (query, key)]
    return *(x * cos + y * sin for x, y in zip((query, key), swapped, strict=True)), None


ON_GPUS_ALONE = {
    "RMSNorm",
    "experts, one without rows",
    *(name for name in kernels.CASES if "FlashAttention 3" in name),
}


@pytest.mark.parametrize("name", [name for name in kernels.CASES if name not in ON_GPUS_ALONE])
def test_a_kernel_that_is_off_is_seen_and_one_that_is_right_passes(name, monkeypatch):
    """By stand-ins for kernels that CPUs lack, written otherwise than their references."""
    monkeypatch.setattr(attention, "flashmask_attention", attend)
    monkeypatch.setattr(kernels, "fused_rotary_position_embedding", turned)
    case = kernels.CASES[name](kernels.ON_CPU)
    assert kernels.difference(case, "float32")[0] < kernels.TOLERANCE["float32"]
    if name in kernels.FLASH:
        assert (case.inputs[2].shape[-1] < case.inputs[0].shape[-1]) == name.endswith("latents")

    def times(factor):
        def off(*inputs):
            results = case.kernel(*inputs)
            first, *others = results if isinstance(results, tuple | list) else (results,)
            return (first * factor, *others)

        return kernels.difference(case._replace(kernel=off), "float32")[0]

    assert times(1.05) > kernels.TOLERANCE["bfloat16"]
    assert not times(float("nan")) <= 1


@pytest.mark.parametrize(("ours_ms", "state"), [(103.0, State.OK), (104.0, State.FAILED)])
def test_on_gpus_a_step_may_be_as_much_slower_as_two_medians_differ(tmp_path, monkeypatch, ours_ms, state):
    of = replace(setting(tmp_path, "stock", 1), device="gpu")

    def launch(worker, words, *_, **__):
        job = json.loads(Path(words[0]).read_text())
        assert job["plan"]["galvatron"]["assumed"]["mixed_precision"] == "bf16" and job["shape"]["hidden_size"] == 2048
        sides = {"ours": ours_ms, "other": 100.0}
        result = {side: {"steps_ms": [9e3, 9e3, *5 * [ms]], "losses": [1.0]} for side, ms in sides.items()}
        Path(words[1]).write_text(json.dumps(result))

    monkeypatch.setattr(LAUNCH, launch)
    monkeypatch.setattr(prediction, "BENCHMARKS", tmp_path)
    finding, _ = prediction.stock(of)
    assert finding.state is state and f"{ours_ms:.1f} ms, PaddleNLP 100.0 ms" in finding.found


def test_memory_that_is_not_paddles_is_held_against_the_reserve(tmp_path, monkeypatch):
    of = replace(setting(tmp_path, "overlap"), device="gpu")
    times = {"alone_ms": 10.0, "during_ms": 12.0, "overlap": 1.2, "message_mib": 128}

    def launch(*_, **__):
        assert os.environ["NCCL_MAX_P2P_NCHANNELS"] == "4"
        for rank in range(2):
            own = times | {"driver_mib": used_mib if rank else 500.0, "communicators": 4}
            (tmp_path / f"{rank}.json").write_text(json.dumps(own))

    monkeypatch.setattr(LAUNCH, launch)
    monkeypatch.setattr(faults, "gpu_name", lambda: "NVIDIA H100 80GB HBM3")
    kept_mib = reserve.CONTEXT.mib + reserve.WORKSPACES.mib + 4 * reserve.COMMUNICATOR_MIB
    for used_mib, state in ((kept_mib + 1, State.FAILED), (kept_mib - 1, State.OK)):
        slowed, reduced, memory = faults.overlap(of)
        assert "1.20" in slowed.found and "128 MiB" in reduced.subject
        assert memory.state is state and f"{gib(used_mib)} GiB used" in memory.found


def test_what_is_asked_wrongly_is_refused(tmp_path, galvatron):
    (tmp_path / "mine").write_text("x")
    for words, message in (
        (["--nproc", 3], "nproc: 3 is odd"),
        (["--parts", "parity,speed"], "parts: 'speed' is unknown; choose some of kernels, parity, schedules"),
        (["--output", tmp_path], "holds other things"),
    ):
        ran = galvatron("gpu-check", *words)
        assert ran.code == 2 and message in ran.err
    assert (tmp_path / "mine").exists()


def test_only_what_a_check_wrote_is_removed_and_two_never_share_a_folder(tmp_path, galvatron, monkeypatch):
    out = tmp_path / "out"
    monkeypatch.setattr(run, "_machine", dict)
    monkeypatch.setattr(run, "PARTS", {"stock": run.Timed(lambda of: iter([of.found("one", False, "")]), 0.5)})
    words = ["gpu-check", "--parts", "stock", "--nproc", 1, "--minutes", 1, "--output", out]

    def refused(message: str) -> None:
        before = sorted(tmp_path.rglob("*"))
        ran = galvatron(*words)
        assert ran.code == 2 and message in ran.err and sorted(tmp_path.rglob("*")) == before, ran.err

    (out / "stock").mkdir(parents=True)
    (out / "stock" / "precious").write_text("x")
    for name in (run.RESULT, run.MACHINE):  # names that any experiment has
        (out / name).write_text('{"a": 1}')
        refused("holds other things")
    shutil.rmtree(out)
    assert galvatron(*words).code == 1
    assert sorted(path.name for path in out.iterdir()) == [run.BUNDLE, run.MACHINE, run.RESULT, "stock"]
    (out / "stock" / "of the first").write_text("x")
    (out / "notes.txt").write_text("mine")
    refused("holds other things")
    (out / "notes.txt").unlink()
    with locked(out):
        refused("is in use by process")
    assert galvatron(*words).code == 1 and not (out / "stock" / "of the first").exists()


def test_faults_are_tried_on_cpu_processes(tmp_path, galvatron):
    ran = galvatron("gpu-check", "--parts", "resume,later", "--nproc", 2, "--output", tmp_path / "out", "--json")
    result = json.loads(ran.out)
    assert ran.code == 0 and result["result"] == "ok", ran.out + ran.err
    wanted = [("resume", "ok"), ("later", "ok"), ("later", "ok")]
    assert [(one["part"], one["state"]) for one in result["findings"]] == wanted
    assert "rank 1 ran out of memory" in result["findings"][2]["found"]


def test_kernels_and_what_runs_beside_messages_are_tried_on_cpu_processes(tmp_path, galvatron):
    ran = galvatron("gpu-check", "--parts", "kernels,overlap", "--nproc", 2, "--output", tmp_path / "out", "--json")
    findings = json.loads(ran.out)["findings"]
    assert ran.code == 0, ran.out + ran.err
    states = {one["subject"]: one["state"] for one in findings if one["part"] == "kernels"}
    on_cpu = {"SwiGLU", "linear with bias", "embedding, half of the tokens the same", "AdamW, two steps"}
    on_cpu |= {"experts, one without rows"}
    assert {name for name, state in states.items() if state == "ok"} >= on_cpu and len(states) == len(kernels.NAMES)
    assert set(states.values()) == {"ok", "skipped"}
    others = [one["state"] for one in findings if one["part"] == "overlap"]
    assert others == ["info", "info", "skipped"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "states"),
    [
        ("parity", {State.OK: 2 * len(parity_cases(2, Precision.BF16, False)), State.SKIPPED: 1}),
        ("schedules", {State.OK: len(list(schedule_cases(2))), State.SKIPPED: 1}),
        ("prediction", {State.OK: 11, State.INFO: 5, State.SKIPPED: 1}),
        ("stock", {State.INFO: 3}),
        ("memory", {State.OK: 1}),
    ],
)
def test_all_parts_run_on_cpu_processes(tmp_path, galvatron, part, states):
    ran = galvatron("gpu-check", "--parts", part, "--nproc", 2, "--minutes", 60, "--output", tmp_path / "out")
    findings = [Finding(**one) for one in json.loads((tmp_path / "out" / run.RESULT).read_text())["findings"]]
    failed = [finding for finding in findings if finding.state == State.FAILED]
    assert ran.code == 0 and not failed, failed or ran.out
    assert Counter(finding.state for finding in findings) == states


def test_experts_are_tried_where_a_wait_would_hang_a_pipeline():
    named = {one.name: one.case.plan for one in schedule_cases(4) if one.case.shape.experts}
    assert {plan.schedule for plan in named.values()} == set(Schedule)
    assert any(plan.chunks > 1 for plan in named.values())
    assert any(plan.micro_batches < plan.pipeline for plan in named.values())
    assert all(layer.ep == 2 for plan in named.values() for layer in plan.layers)


def test_memory_that_a_later_step_takes_is_a_fault(tmp_path, monkeypatch):
    [left_out] = faults.waits(setting(tmp_path, "waits"))
    assert left_out.state is State.SKIPPED
    cases = parity.waiting_cases(2)
    rest = len(cases) - 3
    rows = [[[5, 5, 5]] * len(cases), [[5, 5, 5], [5, 5, 2**21 + 5], [2**21, 0, 2**21], *[[7, 7, 7]] * rest]]

    def launched(module, words, ranks, *_, **named):
        for rank, found in enumerate(rows):
            (tmp_path / f"{rank}.json").write_text(json.dumps(found))

    monkeypatch.setattr(LAUNCH, launched)
    found = [*faults.waits(replace(setting(tmp_path, "waits"), device="gpu"))]
    assert [one.state for one in found] == [State.OK, State.FAILED, State.FAILED, *[State.OK] * rest]
    assert found[1].found.startswith("2.0 MiB taken or given back")


def bf16(x: np.ndarray) -> np.ndarray:
    """Numbers in fp32 as bf16 holds them."""
    bits = x.astype(np.float32).view(np.uint32)
    return (bits + ((bits >> 16) & 1) + 0x7FFF & 0xFFFF0000).view(np.float32)


def in_turn(terms: np.ndarray, at_once: int) -> np.ndarray:
    """Sums [H] of terms [n, H]: some at once in fp32, each of these sums added in bf16."""
    total = np.zeros(terms.shape[1], np.float32)
    for start in range(0, len(terms), at_once):
        total = bf16(total + terms[start : start + at_once].sum(0))
    return total


@pytest.mark.parametrize(
    ("case", "at_once", "passes"),
    [
        pytest.param(kernels.embedding, kernels.SUMMED_AT_ONCE, True, id="embedding"),
        pytest.param(kernels.embedding, 1, False, id="embedding, token by token"),
        pytest.param(kernels.rms_norm, 4096, True, id="norm and bias: fp32, one rounding"),
        pytest.param(kernels.loss, 4096, True, id="loss: fp32, one rounding"),
    ],
)
def test_a_kernel_is_judged_by_its_own_order_of_additions(case, at_once, passes):
    """Half of the tokens of a GPU's case are one word: 2,048 terms; over 50 seeds."""
    made = case(replace(kernels.ON_CPU, tokens=kernels.ON_GPU.tokens, dtype="bfloat16"))
    off = []
    for seed in range(50):
        terms = bf16(np.random.default_rng(seed).standard_normal((2048, 512)))
        exact = terms.sum(0, dtype=np.float64)
        off.append(np.abs(in_turn(terms, at_once) - exact).max() / np.abs(exact).max())
    tolerance = made.tolerance("bfloat16")
    assert max(off) < 0.75 * tolerance if passes else min(off) > tolerance, (min(off), max(off), tolerance)
