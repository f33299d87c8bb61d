"""Pictures that lead through the whole: the files between commands, the memory of a GPU, which parallelism when, the
groups of 64 ranks, and the parts of a report."""

from __future__ import annotations

from collections.abc import Callable

from drawing import COLOURS, INK, LINE, PAPER, Words, box, picture, text, title

import paddlenlp_galvatron as galvatron
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
        "ranks": "64 ranks on 8 nodes: 4 stages, tp 4, dp 4; one colour: one group",
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
        "ranks": "8 个节点上的 64 个 rank：4 个阶段、tp 4、dp 4；同色为一组",
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


def arrow(x: float, y: float, to_x: float, to_y: float, words: str = "") -> list[str]:
    line = f"<line x1='{x:g}' y1='{y:g}' x2='{to_x:g}' y2='{to_y:g}' stroke='{INK}' stroke-width='1.4'/>"
    head = f"<circle cx='{to_x:g}' cy='{to_y:g}' r='3' fill='{INK}'/>"
    label = text((x + to_x) / 2, (y + to_y) / 2 - 6, words, 11, COLOURS[4], "middle") if words else ""
    return [line, head, label]


def way(words: Words) -> str:
    """Commands in boxes, files on the arrows."""
    return picture(
        900,
        250,
        [
            title(words["way"]),
            text(16, 70, words["sheet"], 12),
            *node_of(16, 78, 180, words["profile"]),
            *arrow(196, 95, 320, 95, words["profiles"]),
            *node_of(320, 78, 150, words["search"], "#cfe8e4"),
            *arrow(470, 95, 580, 95, words["plan"]),
            *node_of(580, 78, 150, words["train"], "#cfe8e4"),
            *arrow(730, 95, 800, 95, words["checkpoints"]),
            *node_of(730, 190, 160, words["convert"]),
            *arrow(800, 95, 810, 190),
            *node_of(310, 190, 180, words["explain"]),
            *arrow(395, 112, 395, 190, words["plan"]),
            *arrow(620, 112, 490, 207, words["log"]),
            *node_of(16, 190, 180, words["data"]),
            *arrow(196, 207, 596, 112, words["corpus"]),
        ],
    )


def memory(words: Words) -> str:
    """One stage's predicted memory, term by term, by the search."""
    found = galvatron.search("qwen2.5-7b", device="h100-80gb", gpus=8)
    stage, budget = found.result.best.prediction.stages[0].memory, load_data_sheet("h100-80gb").memory.value * GIB
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
        parts += [*arrow(316, y + 17, 372, y + 17, words["yes"]), *node_of(372, y, 470, words[answer])]
        parts += arrow(166, y + 34, 166, y + 62)
        parts.append(text(176, y + 54, words["no"], 11, COLOURS[4]))
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
            text(340, y + 20, f"{number + 1}  {words[name]}", 12),
        ]
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
