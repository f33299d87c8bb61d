"""Figures that pages promise are those of the code, in both languages: a limit that moves takes its sentence along."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import pytest
from hostile import run

pytest.importorskip("paddle")


from paddlenlp_galvatron.base import limits, reading
from paddlenlp_galvatron.base.printing import LINE_S
from paddlenlp_galvatron.base.reading import BLOCK_BYTES
from paddlenlp_galvatron.check.findings import EXIT_CODES
from paddlenlp_galvatron.check.gpu import faults as gpu_faults
from paddlenlp_galvatron.check.gpu import kernels, stock
from paddlenlp_galvatron.check.gpu import prediction as gpu_prediction
from paddlenlp_galvatron.check.parity.parity import TOLERANCES
from paddlenlp_galvatron.check.validation import accuracy, work, worker
from paddlenlp_galvatron.check.validation.options import ValidateOptions
from paddlenlp_galvatron.cli import train
from paddlenlp_galvatron.cli.watched import LONG_S
from paddlenlp_galvatron.cli.what_if import REQUEST_S, WAITING
from paddlenlp_galvatron.cost_model.variants import FLOPS_PER_BYTE
from paddlenlp_galvatron.launch import faults, gpus, processes, store, watch
from paddlenlp_galvatron.measure import messages, stopwatch
from paddlenlp_galvatron.model import load_model
from paddlenlp_galvatron.model.layer import Fused
from paddlenlp_galvatron.plan import Precision, file, strategy
from paddlenlp_galvatron.planner import explain
from paddlenlp_galvatron.profiles import files, reserve
from paddlenlp_galvatron.profiles.analytic import ON_GPUS, layer_numbers_per_token
from paddlenlp_galvatron.report import measured, page
from paddlenlp_galvatron.report.plan import MOST_ROWS
from paddlenlp_galvatron.runtime.cpu_backend import REACH_S
from paddlenlp_galvatron.training.data import corpus, dataset
from paddlenlp_galvatron.training.settings import MOST_TRACED

ROOT = Path(__file__).parents[2]
MIB, MINUTE_S = 2**20, 60
CORE = "".join((ROOT / "search_engine" / name).read_text() for name in ("limits.hpp", "dp_core.cpp")).replace("'", "")
WORDS = {  # how a page may write a number
    "en": {2: "two", 3: "three", 4: "four", 5: "five", 6: "six", 10: "ten"},
    "zh": {2: "两", 3: "三", 4: "四", 5: "五", 6: "六", 10: "十"},
}


def of_core(name: str) -> float:
    """A constant of the search's core."""
    found = re.search(rf"\b{name} = (\d[\de-]*)", CORE)
    assert found, name
    return float(found[1])


def few(precision: Precision) -> tuple[str, ...]:
    """How far losses and gradients may be apart, as pages write it."""
    return tuple(f"{one:.0e}".replace("e-0", "e-") for one in TOLERANCES[precision])


def kept(fused: Fused) -> float:
    """Bytes of a token that Llama-7B's layer keeps for backward, in 16 bits."""
    numbers, scalars = layer_numbers_per_token(load_model("llama-7b"), 2048, 1, False, fused)
    return 2 * numbers + 4 * scalars


# Page, what the code has, and the words around it in either language.
FIGURES = [
    ("checkpoints", [processes.GRACE_S], "an unfinished checkpoint at most {} s", "未写完的检查点最多还有 {} s"),
    ("data", [LINE_S], "or a line every {} s if stderr", "不是终端时，每 {} 秒一行"),
    ("data", [corpus.LARGEST_TEXT / 2**30], "may have at most {} Gi characters", "一个文本文件最多 {} Gi 个字符"),
    ("data", [reading.LARGEST_BYTES / MIB], "a line of JSON {} Mi", "一行 JSON 最多 {} Mi"),
    ("data", [limits.MOST_TRAINED], "a trained vocabulary {} tokens", "训练的词表最多 {} 个"),
    ("data", [reading.DEEPEST], "more than {} nested objects", "超过 {} 层的嵌套"),
    ("data", [dataset.SAMPLED_BLOCKS * BLOCK_BYTES / MIB], "and of {} MiB of the `.bin`", "均匀分布的 {} MiB"),
    ("faults", [run.CPU_S, run.MEMORY_MIB], "{} s of processor time and {} MiB", "{} 秒处理器时间、{} MiB"),
    ("faults", [files.LARGEST_BYTES / MIB], "compared up to {} MiB", "比对到 {} MiB 为止"),
    (
        "faults",
        [MOST_ROWS, train.COUNTED],
        "above {} stages the table ends, above {} ranks",
        "超过 {} 个阶段时表格截断，rank 数乘以策略数超过 {} 时",
    ),
    ("faults", [faults.STOPPED_S], "named after {} s, a computing one", "前者 {} 秒后指出"),
    ("faults", [watch.SILENT_S], "or the node after {} s", "节点失联则在 {} 秒后"),
    ("faults", [REACH_S], "both commands say which, after {} s", "两边的命令在 {} 秒后指出是哪个"),
    ("faults", [faults.WAIT_S / MINUTE_S], "after {} minutes the rank ends", "{} 分钟后该 rank 自行结束"),
    ("faults", [of_core("kMostBytes")], "the core gives up beyond {} MiB", "核心占用超过 {} MiB 时放弃"),
    ("faults", [dataset.SAMPLED_BLOCKS, BLOCK_BYTES / MIB], "{} blocks of {} MiB", "均匀分布的 {} 个 {} MiB 的块"),
    ("train", [faults.STOPPED_S], "is stopped (SIGSTOP) | that rank, after {} s", "不再继续 | 该 rank，{} 秒后"),
    ("train", [faults.WAIT_S / MINUTE_S], "is: after {} minutes, or", "{} 分钟后，或由"),
    ("train", [watch.SILENT_S], "cannot be reached | that node, after {} s", "无法连通 | 该节点，{} 秒后"),
    ("train", [store.MEETING_S / MINUTE_S], "that node, after {} minutes", "该节点，{} 分钟后"),
    ("train", [processes.RANKS_PER_CORE], "more than {} processes per core", "每核 {} 个"),
    ("train", [processes.RANK_MIB], "less than {} MiB of free memory", "每个 {} MiB"),
    ("train", [*few(Precision.FP32)], "fp32 they may differ by {} and {}", "fp32 允许相差 {} 与 {}"),
    ("train", [*few(Precision.BF16)], "in bf16 by {} and {}", "bf16 为 {} 与 {}"),
    ("train", [*few(Precision.FP16)], "in fp16 by {} and {}", "fp16 为 {} 与 {}"),
    ("health", [100 * measured.TOLERANCE], "If a prediction is off by more than {} %", "（偏高或偏低）超过 {} %"),
    ("health", [measured.WINDOW_STEPS], "over the last {} steps, one warning", "最近 {} 步内，若某项"),
    ("health", [measured.WARM_UP_STEPS], "The first {} steps of a process", "每个进程的前{}步不计"),
    ("health", [measured.ENOUGH_STEPS], "at least {} more are needed", "其后至少要有{}步"),
    ("what_if", [WAITING], "At most {} questions\nwait", "最多有 {} 个问题等待"),
    ("what_if", [REQUEST_S], "completely after {} s is dropped", "{} 秒内没有发完的请求"),
    ("search", [LONG_S], "After {} s a line on stderr", "超过 {} 秒时，stderr"),
    ("search", [LINE_S], "a line every {} s where stderr is no terminal", "不是终端时每 {} 秒一行"),
    ("search", [of_core("kMostBytes")], "its core uses up to {} MiB", "核心至多持有 {} MiB"),
    ("fit", [reserve.CONTEXT.mib], "| CUDA context | {} |", "| CUDA 上下文 | {} |"),
    ("fit", [reserve.WORKSPACES.mib], "| workspaces | {} |", "| 工作区 | {} |"),
    (
        "fit",
        [reserve.COMMUNICATORS, round(reserve.COMMUNICATOR_MIB)],
        "| communicators | {} × {} |",
        "| 通信器 | {} × {} |",
    ),
    ("fit", [100 * reserve.ALLOCATOR], "else {} % of the tensors", "否则为张量的 {} %"),
    ("fit", [round(100 * reserve.WORKING, 1)], "{} % of the working memory", "加临时显存的 {} %"),
    ("profile", [messages.LONGEST_MS], "takes more than {} ms no larger", "第一个耗时超过 {} ms 的消息之后"),
    (
        "profile",
        [stopwatch.ROUNDS, stopwatch.MOST_ROUNDS],
        "in {} rounds at different times, and in up to {}",
        "测量 {} 轮；若各轮离散超过 30 %，至多测到 {} 轮",
    ),
    ("profile", [100 * stopwatch.WIDE], "spread by more than {} %", "离散超过 {} %"),
    ("explain", [MOST_TRACED], "only a few steps; {} is the limit", "最多 {} 步"),
    (
        "explain",
        [int(explain.SEARCHES_S)],
        "times, in {} s of processor time",
        "合计至多约 {} 秒处理器时间",
    ),
    ("explain", [int(explain.FRONTIER_S)], "ten times more, in {} s", "另做十次，至多约 {} 秒"),
    ("explain", [page.MOST_SPANS], "the first {} passes are drawn", "只画前 {} 次"),
    ("validate", [worker.VISIT_S], "for about {} seconds", "约 {} 秒"),
    ("validate", [worker.LEAST_STEPS], "at least {} of them", "至少{}步"),
    ("validate", [100 * accuracy.CLEAR], "more than {} % behind", "认为落后 {} % 以上"),
    ("plan_file", [file.LISTED], "each of the newest {}", "最新的{}个"),
    (
        "gpus",
        [*few(Precision.FP32), *few(Precision.BF16)],
        "within {} and {} (fp32), {} and {} (bf16)",
        "不超过 {} 与 {}（fp32）、{} 与 {}（bf16）",
    ),
    ("gpus", [f"{gpu_faults.GPU_TOLERANCE:.0e}".replace("e-0", "e-")], "on GPUs within {}", "GPU 上误差不超过 {}"),
    (
        "gpus",
        [gpu_prediction.LEAST_MEMORY, gpu_prediction.MOST_MEMORY],
        "take {} to {} of what",
        "预测的 {} 至 {} 倍",
    ),
    ("gpus", [100 * stock.TOLERANCE], "at most {} % longer", "最多慢 {} %"),
    ("gpus", [messages.GPU_MESSAGE_MIB], "all-reduces of {} MiB", "与 {} MiB 的 all-reduce"),
    ("gpus", [f"{kernels.TOLERANCE['bfloat16']:.0e}".replace("e-0", "e-")], "within {} of plain", "误差不超过 {} |"),
    ("gpus", [EXIT_CODES["incomplete"]], "`incomplete` ({})", "`incomplete`（{}）"),
    ("gpus", [gpus.CHANNELS], "NCCL_MAX_P2P_NCHANNELS={}", "NCCL_MAX_P2P_NCHANNELS={}"),
    (
        "cost_model",
        [FLOPS_PER_BYTE],
        "operations ({} operations count as one byte",
        "搬运一个字节折合 {} 次运算",
    ),
    ("cost_model", [strategy.JOINED_NUMBERS / MIB], "ddp up to {} Mi weights", "ddp 不超过 {} Mi 个权重"),
    ("cost_model", [round(100 * (1 - kept(ON_GPUS) / kept(Fused.ATTENTION)))], "that is {} % less", "少保留 {} %"),
    (
        "security",
        [files.MOST_FILES, files.LARGEST_BYTES / MIB],
        "{} of them and {} MiB each",
        "最多 {} 个，每个最多 {} MiB",
    ),
]


def written(value: float | str, language: str) -> set[str]:
    if isinstance(value, str):
        return {value}
    assert value == round(value, 2)
    return {f"{value:g}" if value < 1e5 else f"{value:.0f}"} | {WORDS[language].get(int(value), "")} - {""}


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize(("name", "values", "en", "zh"), FIGURES)
def test_a_figure_is_that_of_the_code(name, values, en, zh, language):
    path = ROOT / "SECURITY.md" if (name, language) == ("security", "en") else ROOT / f"docs/{language}/{name}.md"
    text = re.sub(r"[\s,]", "", path.read_text())  # lines end anywhere, and some numbers have commas
    sentence = {"en": en, "zh": zh}[language]
    ways = product(*(written(value, language) for value in values))
    assert any(re.sub(r"[\s,]", "", sentence.format(*way)) in text for way in ways), (sentence, values)


def test_the_advised_budget_is_nine_tenths():
    assert measured.MARGIN == 0.9  # health.md says it in words


def test_the_third_fastest_of_fifteen_steps_counts():
    fields = ValidateOptions.model_fields
    steps = fields["visits"].default * fields["steps"].default
    assert (steps, round(work.QUICK * (steps - 1))) == (15, 2)  # the help says it in words
    for language, told in (("en", "third fastest of 15 steps"), ("zh", "15 步中第三快的一步")):
        assert told in " ".join((ROOT / "docs" / language / "validate.md").read_text().split()), language
