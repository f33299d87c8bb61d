"""Pictures that lead through the whole: the files between commands, the memory of a GPU, which parallelism when, the
groups of 64 ranks, and the parts of a report."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import hypot
from typing import Any

from drawing import COLOURS, INK, LINE, PAPER, Words, box, picture, text, title

import paddlenlp_galvatron as galvatron
from paddlenlp_galvatron.options.model_options import SEQ
from paddlenlp_galvatron.plan import LayerStrategy
from paddlenlp_galvatron.plan.mesh import Axis
from paddlenlp_galvatron.profiles.data_sheet import load_data_sheet

GIB = 1024  # MiB
STAGES, STAGE_SIZE, NODE = 4, 16, 8  # of 64 ranks
OVERVIEW: dict[str, Words] = {
    "en": {
        "way": "The whole way, and the files between its steps",
        "data": "galvatron data prepare",
        "sheet": "a data sheet, or",
        "profile": "galvatron profile all",
        "search": "galvatron search",
        "explain": "explain, report, what-if",
        "train": "galvatron train",
        "convert": "galvatron convert g2h",
        "profiles": "configs/*.json",
        "plan": "plan.json",
        "corpus": "mine.bin, mine.idx",
        "checkpoints": "checkpoints/",
        "log": "train_log.jsonl",
        "calibrate": "report --log, calibrate",
        "memory": "Memory of a GPU: qwen2.5-7b on 8 H100 80GB, stage 0, in GiB",
        "states": "model states",
        "activations": "activations",
        "working": "working memory",
        "reserve": "reserve: CUDA, NCCL, allocator",
        "estimate": "estimate",
        "bound": "bound",
        "budget": "budget",
        "tree": "Which parallelism when: the questions, in order",
        "yes": "yes",
        "no": "no",
        "q1": "Do model states fit on one GPU?",
        "a1": "data parallel, zero2 if memory is short",
        "q2": "Do they fit on one node, sharded?",
        "a2": "zero2 or zero3 in the node; tp 2 to 8 with Megatron-SP for activations",
        "q3": "Is the batch many times the number of stages?",
        "a3": "pipeline across nodes, tp in a node; more chunks for fewer bubbles",
        "a4": "zero3 over nodes, or fewer GPUs",
        "also": "besides: from 16k tokens context parallel or Ulysses; experts: ep in a node; activations: recompute",
        "ranks": "64 ranks on 8 nodes: 4 stages, tp 4, dp 4; a group of a stage has one colour",
        "tensor": "tensor parallel",
        "dp": "data parallel",
        "pipeline": "stages",
        "node": "node",
        "report": "The report, part by part",
        "head": "the verdict: step, tokens/s, MFU, gap to the lower bound",
        "bottleneck": "the bottleneck: what limits the step, and what to try",
        "layers": "layers by stage, coloured by strategy",
        "bars": "memory of each stage against the budget",
        "steps": "measured steps against the prediction, with --log",
    },
    "zh": {
        "way": "完整流程，以及各步之间的文件",
        "data": "galvatron data prepare",
        "sheet": "硬件参数文件，或",
        "profile": "galvatron profile all",
        "search": "galvatron search",
        "explain": "explain、report、what-if",
        "train": "galvatron train",
        "convert": "galvatron convert g2h",
        "profiles": "configs/*.json",
        "plan": "plan.json",
        "corpus": "mine.bin、mine.idx",
        "checkpoints": "checkpoints/",
        "log": "train_log.jsonl",
        "calibrate": "report --log、calibrate",
        "memory": "一张卡的显存：8 张 H100 80GB 上的 qwen2.5-7b，阶段 0，单位 GiB",
        "states": "模型状态",
        "activations": "激活",
        "working": "工作显存",
        "reserve": "预留：CUDA、NCCL、分配器",
        "estimate": "估计值",
        "bound": "上界",
        "budget": "预算",
        "tree": "何时用哪种并行：依次回答",
        "yes": "是",
        "no": "否",
        "q1": "一张卡放得下模型状态吗？",
        "a1": "数据并行；显存紧张时用 zero2",
        "q2": "分片后一个节点放得下吗？",
        "a2": "节点内 zero2 或 zero3；激活过大时加 tp 2 至 8（Megatron-SP）",
        "q3": "批大小是阶段数的许多倍吗？",
        "a3": "节点间流水线，节点内 tp；增加虚拟块以减少气泡",
        "a4": "跨节点 zero3，或减少卡数",
        "also": "另外：样本从 16k token 起用上下文并行或 Ulysses；专家：节点内 ep；激活：部分重计算",
        "ranks": "8 个节点上的 64 个 rank：4 个阶段、tp 4、dp 4；同一阶段内同色为一组",
        "tensor": "张量并行",
        "dp": "数据并行",
        "pipeline": "阶段",
        "node": "节点",
        "report": "报告的各部分",
        "head": "结论：单步时间、tokens/s、MFU、与下界的差距",
        "bottleneck": "瓶颈：什么限制单步时间，可以试什么",
        "layers": "各阶段的层，按策略着色",
        "bars": "各阶段的显存与预算",
        "steps": "实测的步与预测之比（--log）",
    },
}


def node_of(x: float, y: float, width: float, words: str, colour: str = "#e6f2f0") -> list[str]:
    return [box(x, y, width, 34, colour), text(x + width / 2, y + 22, words, 12, anchor="middle")]


def arrow(x: float, y: float, to_x: float, to_y: float) -> list[str]:
    length = hypot(to_x - x, to_y - y)
    across, down = (to_x - x) / length, (to_y - y) / length
    back = to_x - 9 * across, to_y - 9 * down
    sides = [(to_x, to_y), *((back[0] - 4 * sign * down, back[1] + 4 * sign * across) for sign in (1, -1))]
    points = " ".join(f"{one:.1f},{other:.1f}" for one, other in sides)
    return [
        f"<line x1='{x:g}' y1='{y:g}' x2='{back[0]:.1f}' y2='{back[1]:.1f}' stroke='{INK}' stroke-width='1.4'/>",
        f"<polygon points='{points}' fill='{INK}'/>",
    ]


def label(x: float, y: float, words: str, anchor: str = "middle") -> str:
    return text(x, y, words, 11, COLOURS[4], anchor)


def way(words: Words) -> str:
    """Commands in boxes, files at the arrows."""
    return picture(
        900,
        242,
        [
            title(words["way"]),
            text(16, 70, words["sheet"], 12),
            *node_of(16, 78, 160, words["profile"]),
            *node_of(276, 78, 140, words["search"], "#cfe8e4"),
            *node_of(506, 78, 140, words["train"], "#cfe8e4"),
            *node_of(736, 78, 148, words["convert"]),
            *node_of(256, 190, 180, words["explain"]),
            *node_of(486, 190, 180, words["data"]),
            *node_of(716, 190, 168, words["calibrate"]),
            *[part for x in (176, 416, 646) for part in arrow(x, 95, x + (100 if x == 176 else 90), 95)],
            *arrow(346, 112, 346, 190),
            *arrow(576, 190, 576, 112),
            *arrow(636, 112, 760, 190),
            label(224, 88, words["profiles"]),
            label(457, 88, words["plan"]),
            label(687, 88, words["checkpoints"]),
            label(354, 155, words["plan"], "start"),
            label(584, 172, words["corpus"], "start"),
            label(716, 150, words["log"], "start"),
        ],
    )


@cache
def searched() -> Any:
    """The search of README."""
    return galvatron.search("qwen2.5-7b", device="h100-80gb", gpus=8)


def memory(words: Words) -> str:
    """One stage's predicted memory, term by term, by the search."""
    stage, budget = searched().result.best.prediction.stages[0].memory, load_data_sheet("h100-80gb").memory.value * GIB
    terms = {
        "states": stage.states_mib,
        "activations": stage.activations_mib,
        "working": stage.working_mib,
        "reserve": stage.context_mib,
    }
    scale, x, parts = 760 / budget, 16.0, [title(words["memory"])]
    edges = {"estimate": stage.tensors_mib, "bound": stage.total_mib, "budget": budget}
    for number, (name, mib) in enumerate(terms.items()):
        parts += [box(x, 56, mib * scale, 40, COLOURS[number], 2)]
        parts += [box(16 + number % 2 * 330, 170 + number // 2 * 24, 14, 14, COLOURS[number], 2)]
        parts += [text(36 + number % 2 * 330, 182 + number // 2 * 24, f"{words[name]} {mib / GIB:.1f}", 12)]
        x += mib * scale
    for number, (name, mib) in enumerate(edges.items()):
        at = 16 + mib * scale
        parts.append(f"<line x1='{at:g}' y1='50' x2='{at:g}' y2='{108 + number * 16}' stroke='{INK}'/>")
        parts.append(text(at - 4, 112 + number * 16, f"{words[name]} {mib / GIB:.1f}", 12, anchor="end"))
    return picture(800, 230, parts)


def tree(words: Words) -> str:
    """Three questions and their answers."""
    parts = [title(words["tree"])]
    for row, (question, answer) in enumerate((("q1", "a1"), ("q2", "a2"), ("q3", "a3"))):
        y = 56 + row * 62
        parts += node_of(16, y, 300, words[question], "#cfe8e4")
        parts += [*arrow(316, y + 17, 372, y + 17), *node_of(372, y, 470, words[answer])]
        parts += arrow(166, y + 34, 166, y + 62)
        parts += [label(342, y + 11, words["yes"]), label(176, y + 52, words["no"], "start")]
    parts += node_of(16, 242, 300, words["a4"])
    parts.append(text(16, 306, words["also"], 12))
    return picture(860, 324, parts)


def ranks(words: Words) -> str:
    """Each rank by its tensor-parallel group, its data-parallel group and its stage."""
    mesh = LayerStrategy(4).mesh(STAGE_SIZE)
    by_axis = {
        axis: {rank: k for k, group in enumerate(mesh.groups(axis).tolist()) for rank in group}
        for axis in Axis
        if axis in (Axis.TENSOR, Axis.DATA)
    }
    panels: dict[str, Callable[[int], int]] = {
        "tensor": lambda rank: by_axis[Axis.TENSOR][rank % STAGE_SIZE],
        "dp": lambda rank: by_axis[Axis.DATA][rank % STAGE_SIZE],
        "pipeline": lambda rank: rank // STAGE_SIZE,
    }
    parts = [title(words["ranks"])]
    for panel, (name, group) in enumerate(panels.items()):
        left = 70 + panel * 240
        parts.append(text(left, 58, words[name], 12, weight=600))
        for rank in range(STAGES * STAGE_SIZE):
            row, column = divmod(rank, NODE)
            x, y = left + column * 25, 70 + row * 25
            parts.append(box(x, y, 23, 23, COLOURS[group(rank) % len(COLOURS)], 3))
            parts.append(text(x + 11.5, y + 15, str(rank), 9, PAPER, "middle"))
    parts += [text(16, 86 + row * 25, f"{words['node']} {row}", 11) for row in range(STAGES * STAGE_SIZE // NODE)]
    return picture(790, 290, parts)


def report(words: Words) -> str:
    """Where a report shows what."""
    parts = [title(words["report"])]
    for number, (name, y, height) in enumerate(
        (("head", 52, 30), ("bottleneck", 88, 36), ("layers", 130, 56), ("bars", 192, 46), ("steps", 244, 40))
    ):
        parts += [box(16, y, 300, height, LINE, 4), box(24, y + 6, 20, 20, COLOURS[number], 10)]
        parts += [
            text(34, y + 20, str(number + 1), 12, PAPER, "middle"),
            text(340, y + 20, words[name], 12),
        ]
    result = searched().result
    tokens_per_s = f"{result.require().samples_per_s * SEQ:,.0f} tokens/s"
    parts.append(text(60, 71, f"{result.time_s:.1f} s, {tokens_per_s}, gap {result.gap:.1%}", 12))
    parts.append(text(60, 110, words["activations"], 12))
    parts += [box(60 + k * 15, 140, 13, 16, COLOURS[k // 6], 2) for k in range(16)]
    parts += [box(60 + k * 15, 162, 13, 16, COLOURS[2 + k // 9], 2) for k in range(16)]
    parts += [box(60, 202 + k * 14, 180 + k * 30, 9, COLOURS[k], 2) for k in range(2)]
    parts += [box(60 + k * 22, 276 - 6 * (k % 3) - 12, 10, 12 + 6 * (k % 3), COLOURS[4], 1) for k in range(10)]
    return picture(800, 300, parts)


DIAGRAMS: dict[str, Callable[[Words], str]] = {
    "way": way,
    "memory": memory,
    "tree": tree,
    "ranks": ranks,
    "report": report,
}
