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


# Page, the code's value, and the words around it in either language.
SECURITY = {"en": "SECURITY.md", "zh": "SECURITY_zh.md"}
FIGURES = [
    ("checkpoints", [processes.GRACE_S], "an unfinished checkpoint at most {} s", "未写完的检查点最多还有 {} s"),
    ("data", [LINE_S], "or a line every {} s if stderr", "不是终端时，每 {} 秒一行"),
    ("data", [corpus.LARGEST_TEXT / 2**30], "may have at most {} Gi characters", "一个文本文件最多 {} Gi 个字符"),
    ("data", [reading.LARGEST_BYTES / MIB], "a line of JSON {} Mi", "一行 JSON 最多 {} Mi"),
    ("data", [limits.MOST_TRAINED], "a trained vocabulary {} tokens", "训练的词表最多 {} 个"),
    ("data", [reading.DEEPEST], "more than {} nested objects", "超过 {} 层的嵌套"),
    ("data", [dataset.SAMPLED_BLOCKS * BLOCK_BYTES / MIB], "and of {} MiB of the `.bin`", "均匀分布的 {} MiB"),
    ("train", [faults.STOPPED_S], "is stopped (SIGSTOP) | that rank, after {} s", "不再继续 | 该 rank，{} 秒后"),
    ("train", [faults.WAIT_S / MINUTE_S], "is: after {} minutes, or", "{} 分钟后，或由"),
    ("train", [watch.SILENT_S], "cannot be reached | that node, after {} s", "无法连通 | 该节点，{} 秒后"),
    ("train", [store.MEETING_S / MINUTE_S], "that node, after {} minutes", "该节点，{} 分钟后"),
    ("train", [processes.RANKS_PER_CORE], "more than {} processes per core", "每核 {} 个"),
    ("train", [processes.RANK_MIB], "less than {} MiB of free memory", "每个 {} MiB"),
    ("train", [*few(Precision.FP32)], "fp32 they may differ by {} and {}", "fp32 允许相差 {} 与 {}"),
    ("train", [*few(Precision.BF16)], "in bf16 by {} and {}", "bf16 为 {} 与 {}"),
    ("train", [*few(Precision.FP16)], "in fp16 by {} and {}", "fp16 为 {} 与 {}"),
    ("tuning", [100 * measured.TOLERANCE], "If a prediction is off by more than {} %", "（偏高或偏低）超过 {} %"),
    ("tuning", [measured.WINDOW_STEPS], "over the last {} steps, one warning", "最近 {} 步内，若某项"),
    ("tuning", [measured.WARM_UP_STEPS], "The first {} steps of a process", "每个进程的前{}步不计"),
    ("tuning", [measured.ENOUGH_STEPS], "at least {} more are needed", "其后至少要有{}步"),
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
    ("explain", [int(explain.SEARCHES_S)], "times, in {} s of processor time", "合计至多约 {} 秒处理器时间"),
    ("explain", [int(explain.FRONTIER_S)], "ten times more, in {} s", "另做十次，至多约 {} 秒"),
    ("explain", [page.MOST_SPANS], "the first {} passes are drawn", "只画前 {} 次"),
    ("plan_file", [file.LISTED], "each of the newest {}", "最新的{}个"),
    (
        "installation",
        [*few(Precision.FP32), *few(Precision.BF16)],
        "within {} and {} (fp32), {} and {} (bf16)",
        "不超过 {} 与 {}（fp32）、{} 与 {}（bf16）",
    ),
    (
        "installation",
        [f"{gpu_faults.GPU_TOLERANCE:.0e}".replace("e-0", "e-")],
        "on GPUs within {}",
        "GPU 上误差不超过 {}",
    ),
    (
        "installation",
        [gpu_prediction.LEAST_MEMORY, gpu_prediction.MOST_MEMORY],
        "take {} to {} of the prediction",
        "预测的 {} 至 {} 倍",
    ),
    ("installation", [100 * stock.TOLERANCE], "at most {} % longer", "最多慢 {} %"),
    ("installation", [messages.GPU_MESSAGE_MIB], "all-reduces of {} MiB", "与 {} MiB 的 all-reduce"),
    (
        "installation",
        [f"{kernels.TOLERANCE['bfloat16']:.0e}".replace("e-0", "e-")],
        "within {} of plain",
        "误差不超过 {} |",
    ),
    ("installation", [EXIT_CODES["incomplete"]], "`incomplete` ({})", "`incomplete`（{}）"),
    (
        "security",
        [files.MOST_FILES, files.LARGEST_BYTES / MIB],
        "{} of them and {} MiB each",
        "最多 {} 个，每个最多 {} MiB",
    ),
]
OF_DEVELOPERS = [  # in English alone
    ("faults", [run.CPU_S, run.MEMORY_MIB], "{} s of processor time and {} MiB"),
    ("faults", [files.LARGEST_BYTES / MIB], "compared up to {} MiB"),
    ("faults", [MOST_ROWS, train.COUNTED], "above {} stages the table ends, above {} ranks"),
    ("faults", [faults.STOPPED_S], "named after {} s, a computing one"),
    ("faults", [watch.SILENT_S], "or the node after {} s"),
    ("faults", [REACH_S], "both commands say which, after {} s"),
    ("faults", [faults.WAIT_S / MINUTE_S], "after {} minutes the rank ends"),
    ("faults", [of_core("kMostBytes")], "the core gives up beyond {} MiB"),
    ("faults", [dataset.SAMPLED_BLOCKS, BLOCK_BYTES / MIB], "{} blocks of {} MiB"),
    ("validate", [worker.VISIT_S], "for about {} seconds"),
    ("validate", [worker.LEAST_STEPS], "at least {} of them"),
    ("validate", [100 * accuracy.CLEAR], "more than {} % behind"),
    ("gpus", [gpus.CHANNELS], "NCCL_MAX_P2P_NCHANNELS={}"),
    ("cost_model", [FLOPS_PER_BYTE], "operations ({} operations count as one byte"),
    ("cost_model", [strategy.JOINED_NUMBERS / MIB], "ddp up to {} Mi weights"),
    ("cost_model", [round(100 * (1 - kept(ON_GPUS) / kept(Fused.ATTENTION)))], "that is {} % less"),
]


def written(value: float | str, language: str) -> set[str]:
    if isinstance(value, str):
        return {value}
    assert value == round(value, 2)
    return {f"{value:g}" if value < 1e5 else f"{value:.0f}"} | {WORDS[language].get(int(value), "")} - {""}


CASES = [(ROOT / "docs" / "dev" / f"{name}.md", values, "en", words) for name, values, words in OF_DEVELOPERS] + [
    (ROOT / (SECURITY[language] if name == "security" else f"docs/{language}/{name}.md"), values, language, words)
    for name, values, *both in FIGURES
    for language, words in zip(SECURITY, both, strict=True)
]


@pytest.mark.parametrize(("path", "values", "language", "sentence"), CASES)
def test_a_figure_is_that_of_the_code(path, values, language, sentence):
    text = re.sub(r"[\s,]", "", path.read_text())  # lines end anywhere, and some numbers have commas
    ways = product(*(written(value, language) for value in values))
    assert any(re.sub(r"[\s,]", "", sentence.format(*way)) in text for way in ways), (sentence, values)


def test_the_advised_budget_is_nine_tenths():
    assert measured.MARGIN == 0.9  # tuning.md says it in words


def test_the_third_fastest_of_fifteen_steps_counts():
    fields = ValidateOptions.model_fields
    steps = fields["visits"].default * fields["steps"].default
    assert (steps, round(work.QUICK * (steps - 1))) == (15, 2)  # the help says it in words
    page = ROOT / "docs" / "dev" / "validate.md"
    assert "third fastest of 15 steps" in " ".join(page.read_text().split())
