"""The parts that train small models under a plan and in one process: sixteen plans, and schedules that could hang."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ...base.writing import scratch_folder
from ...launch.gpus import FLASH_VERSION, THIRD, has_flash_attention_3
from ...model import FAMILIES
from ...plan import Assumptions, DataParallel, LayerStrategy, Plan, Precision, Recompute, VocabStrategy, with_defaults
from ...plan.schedule import Schedule
from ..findings import Finding, State
from ..parity.parity import WORKER, Case, compare_case, small_case, write_cases
from .setting import CheckSetting, in_turn

DDP, ZERO2, ZERO3 = DataParallel.DDP, DataParallel.ZERO2, DataParallel.ZERO3
# Plans of the sixteen that fit one rank.
ONE_RANK = ("data parallel", "degrees mixed, strided, recompute", "tied tables", "split vocabulary, AdamW")
PACKED = ("context parallel", "tied tables")  # cases with several documents a row
ONE_KV_HEAD = "tensor parallel"  # a case whose ranks replicate the kv head
MICRO_BATCHES = (1, 2, 3, 4, 8)  # of the schedules' cases: two stages of 1F1B once hung with three and more


class Named(NamedTuple):
    """A case and its name."""

    name: str
    case: Case


def parity(setting: CheckSetting) -> Iterator[Finding]:
    """Loss and every gradient of sixteen plans, fp32 (on GPUs without TF32) and bf16. A kernel that is off by default
    is reported but not judged."""
    for precision in (Precision.FP32, Precision.BF16):
        cases = parity_cases(setting.ranks, precision, setting.on_gpus)
        if setting.ranks == 1:
            yield setting.skipped(f"{len(cases) - len(ONE_RANK)} plans, {precision}", "they need 2 ranks or more")
            cases = [named for named in cases if named.name in ONE_RANK]
        cases = [Named(f"{named.name}, {precision}", named.case) for named in cases]
        asked = [fused_loss_case(setting.ranks, precision)] if setting.on_gpus and setting.ranks > 1 else []
        for finding in _tried(setting, [*cases, *asked]):
            judged = finding.state is State.NO_TIME or finding.subject not in {named.name for named in asked}
            yield finding if judged else _shown(finding)
    if setting.on_gpus and has_flash_attention_3():
        flash = [named for named in cases if named.case.plan.assumed.flash_attention]
        third = [Named(f"{named.name}, FlashAttention 3", named.case) for named in flash]
        yield from map(_shown, _tried(setting, third, {FLASH_VERSION: THIRD}))
    if not setting.on_gpus:
        yield setting.skipped("flash attention, fused cross entropy", "Paddle has them only on GPUs")


def _shown(finding: Finding) -> Finding:
    return replace(finding, state=State.INFO, found=f"{finding.state}: {finding.found}")


def schedules(setting: CheckSetting) -> Iterator[Finding]:
    """Trains pipelines for two steps and evaluates; a wait for a wrong message would hang them."""
    if setting.ranks == 1:
        yield setting.skipped("pipelines", "they need 2 ranks or more")
        return
    if setting.ranks < 4:
        yield setting.skipped("stages of Ulysses, Megatron-SP and zero3", "they need 4 ranks or more")
    yield from _tried(setting, list(schedule_cases(setting.ranks)))


def _tried(setting: CheckSetting, cases: Sequence[Named], variables: Mapping[str, str] = {}) -> Iterator[Finding]:
    with scratch_folder("galvatron-check-") as folder:
        write_cases(folder, [named.case for named in cases])

        def start(first: int, number: int) -> None:
            logs = setting.folder / f"{cases[first].case.plan.assumed.mixed_precision}-{number}"
            setting.launch(WORKER, folder, first, logs=logs, variables=variables)

        def judge(index: int) -> Finding | None:
            if not all((folder / f"{index}.{rank}.json").exists() for rank in range(setting.ranks)):
                return None
            result = compare_case(folder, cases[index].case, index)
            loss, gradient = result.limits
            losses = f"loss {result.max_loss_diff:.1e} of {loss:.0e}"
            figures = f"{losses}, gradient {result.max_grad_rel_diff:.1e} of {gradient:.0e}"
            return setting.found(cases[index].name, result.agrees, figures)

        yield from in_turn(setting, [named.name for named in cases], start, judge)


def parity_cases(ranks: int, precision: Precision, on_gpus: bool) -> list[Named]:
    """Sixteen plans: every degree, way to split, ZeRO stage, schedule and recomputed module; ZeRO in a subset of the
    ranks, offloaded optimizer and activations, chunked loss, packed rows, and MLA and experts after a dense layer.
    `on_gpus`: some use training's defaults there (flash attention and other kernels), others plain operations."""
    n, half = ranks, max(1, ranks // 2)
    wide, inner = min(2, n), half if half > 1 else 1
    unsplit, strided = LayerStrategy(), LayerStrategy(wide, consecutive=not n > 2)
    split, whole, ulysses = LayerStrategy(wide), LayerStrategy(n), LayerStrategy(wide, ulysses=wide > 1)
    again, shard = LayerStrategy(recompute=Recompute.FULL), LayerStrategy(dp_type=ZERO3)
    in_part = replace(shard, sharding=half if half > 1 else None)
    routed, cut = LayerStrategy(ep=inner), replace(again, etp=inner)
    core, parts = Recompute.ATTENTION, Recompute.NORMS | Recompute.MLP
    low, context = LayerStrategy(inner), LayerStrategy(context=wide)
    stages = (1, 2) if n > 1 else (3,)
    plain = Assumptions(mixed_precision=precision, fp32_gradients=False, flash_attention=False)
    usual = Assumptions(mixed_precision=precision)
    megatron = replace(plain, sequence_parallel=True)
    each = replace(plain, async_grad_reduce=False)
    gpipe = _plan(n, (unsplit, low, unsplit), megatron, stages, schedule=Schedule.GPIPE)
    plans = {
        "data parallel": (_plan(n, (unsplit, unsplit), plain), "llama", False),
        "tensor parallel": (_plan(n, (whole, whole), plain, vocab=n, pieces=2), "qwen2", False),
        "tensor parallel, Megatron-SP": (_plan(n, (whole, again), megatron, vocab=n), "llama", False),
        "degrees mixed, strided, recompute": (_plan(n, (strided, again, whole), megatron, vocab=wide), "qwen3", False),
        "Ulysses": (_plan(n, (ulysses, replace(ulysses, recompute=core), unsplit), plain, vocab=wide), "qwen2", False),
        "context parallel": (_plan(n, (context, replace(context, recompute=parts), split), usual), "qwen3", False),
        "zero2, reduced every micro-batch": (_plan(n, (unsplit, split), each, default=ZERO2), "deepseek_v3", False),
        "zero3": (_plan(n, (in_part, replace(split, dp_type=ZERO3), unsplit), plain), "qwen2", False),
        "tied tables": (_plan(n, (unsplit, split), usual, vocab=wide), "llama", True),
        "two stages, 1F1B": (_plan(n, (unsplit, again, low), plain, stages, micro_batches=4), "qwen2", False),
        "two stages, GPipe": (gpipe, "llama", False),
        "two stages, zero3": (_plan(n, (shard, low, shard), usual, stages, micro_batches=4), "deepseek_v2", False),
        "two stages, experts": (_plan(n, (unsplit, cut, routed), usual, stages, micro_batches=4), "qwen3_moe", False),
        "two stages, tied tables": (_plan(n, (unsplit, low, unsplit), usual, stages, default=ZERO2), "ernie4_5", True),
    }
    named = [
        _named(
            name,
            with_defaults(of, on_gpus),
            family,
            2,
            tied=tied,
            dense_layers=(0,) if FAMILIES[family].mixture else (),
            kv_heads=1 if name == ONE_KV_HEAD else None,
            packed=name in PACKED,
        )
        for name, (of, family, tied) in plans.items()
    ]
    layers = replace(unsplit, offload=60), replace(split, offload=100), shard
    away = _plan(n, layers, replace(usual, offload_optimizer=True), default=ZERO2)
    case = small_case(with_defaults(away, on_gpus), "qwen2", "adamw", 2)
    named.append(Named("optimizer and activations in the host's memory", case))
    return [*named, Named("split vocabulary, AdamW", _as_trained(n, usual, on_gpus))]


def fused_loss_case(ranks: int, precision: Precision) -> Named:
    """A plan for GPUs with Paddle's fused loss of a split vocabulary, which is off by default."""
    assumed = Assumptions(mixed_precision=precision, fused_cross_entropy=True)
    return Named(f"fused cross entropy, {precision}", _as_trained(ranks, assumed, on_gpus=True))


def _as_trained(n: int, assumed: Assumptions, on_gpus: bool) -> Case:
    """A typical case: AdamW, Megatron-SP, and a split vocabulary without padding, so that a fused kernel may compute
    its loss. From four ranks on it is in the last stage only."""
    half = max(1, n // 2)
    degree, stages = (half, (1, 2)) if n > 2 else (n, (3,))
    low, unsplit = LayerStrategy(half), LayerStrategy()
    plan = _plan(n, (low, unsplit, low), replace(assumed, sequence_parallel=True), stages, vocab=degree)
    return small_case(with_defaults(plan, on_gpus), "llama", "adamw", 2, vocabulary=64 * half)


def training_assumptions(on_gpus: bool, seq_length: int) -> Assumptions:
    """Training's defaults on these devices."""
    assumed = Assumptions(True, Precision.BF16 if on_gpus else Precision.FP32, seq_length=seq_length)
    return with_defaults(_plan(1, (LayerStrategy(),), assumed), on_gpus).assumed


def schedule_cases(ranks: int) -> Iterator[Named]:
    """Pipelines that would deadlock on a wait for a wrong message. Two steps each, as GPUs post no receives ahead in
    the first."""
    unsplit = LayerStrategy()
    depths = [stages for stages in (2, 4, 8) if stages <= ranks and ranks % stages == 0]
    for schedule in Schedule:
        for stages in depths:
            for micro_batches in MICRO_BATCHES if stages == 2 else (3, stages + 1):
                plan = _plan(ranks, (unsplit,) * stages, Assumptions(), (1,) * stages, micro_batches, schedule=schedule)
                yield _named(f"{schedule.label}, {stages} stages, {micro_batches} micro-batches", plan, "llama", 2)
    for stages in depths:
        for micro_batches in (stages - 1, stages + 1):
            plan = _plan(ranks, (unsplit,) * 2 * stages, Assumptions(), (1,) * 2 * stages, micro_batches, chunks=2)
            yield _named(f"interleaved, {stages} stages, {micro_batches} micro-batches", plan, "llama", 2)
    yield from experts_cases(ranks)
    if ranks >= 4:
        size = ranks // 2
        inside = {
            "Ulysses": LayerStrategy(size, ulysses=True),
            "Megatron-SP": LayerStrategy(size),
            "zero3": LayerStrategy(dp_type=ZERO3),
        }
        for name, strategy in inside.items():
            plan = _plan(ranks, (strategy, unsplit, strategy), Assumptions(sequence_parallel=True), (1, 2), 5)
            yield _named(f"1F1B, 2 stages of {name}, 5 micro-batches", plan, "qwen2", 2)


def experts_cases(ranks: int) -> Iterator[Named]:
    """Experts in two stages under each schedule: routing must not synchronize with the device, as nearly every pass has
    a receive posted ahead."""
    routed = LayerStrategy(ep=max(1, ranks // 2))
    few = _plan(ranks, (routed,) * 2, Assumptions(), (1, 1), 1)
    gpipe = _plan(ranks, (routed,) * 2, Assumptions(), (1, 1), 3, schedule=Schedule.GPIPE)
    interleaved = _plan(ranks, (routed,) * 4, Assumptions(), (1,) * 4, 3, chunks=2)
    for name, plan, family in (
        ("GPipe", gpipe, "mixtral"),
        ("GPipe, half-turned heads", gpipe, "glm4_moe"),
        ("GPipe, chosen by softmax and bias", gpipe, "ernie4_5_moe"),
        ("interleaved", interleaved, "qwen2_moe"),
        ("1F1B, a micro-batch less than stages", few, "qwen3_moe"),
    ):
        yield _named(f"experts: {name}", plan, family, 2)


def waiting_cases(ranks: int) -> list[Named]:
    """Cases whose memory is checked: a dense one, and those with experts."""
    stages = 2 if ranks > 1 else 1
    dense = _plan(ranks, (LayerStrategy(),) * 2, Assumptions(), (2 // stages,) * stages, 4)
    return [_named("dense", dense, "llama", 2), *(experts_cases(ranks) if ranks > 1 else ())]


def _plan(
    ranks: int,
    layers: tuple[LayerStrategy, ...],
    assumed: Assumptions,
    stages: tuple[int, ...] | None = None,
    micro_batches: int = 2,
    *,
    vocab: int = 1,
    pieces: int = 1,
    default: DataParallel = DDP,
    schedule: Schedule = Schedule.ONE_F_ONE_B,
    chunks: int = 1,
) -> Plan:
    sharded = tuple(replace(layer, dp_type=default) if layer.dp_type is DDP else layer for layer in layers)
    return Plan(
        world_size=ranks,
        global_batch=micro_batches * ranks,
        micro_batches=micro_batches,
        stages=stages or (len(layers),),
        layers=sharded,
        vocab=VocabStrategy(vocab, dp_type=default, pieces=pieces),
        default_dp_type=default,
        schedule=schedule,
        chunks=chunks,
        assumed=assumed,
    )


def _named(name: str, plan: Plan, family: str, steps: int, **how: Any) -> Named:
    return Named(name, small_case(plan, family, steps=steps, **how))
