"""Draws docs/images/*/*.svg: pictures of the pages, from the functions that plans, schedules and prices use.

python tools/pictures.py           write all
python tools/pictures.py --check   exit code 1 where one is not current
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from diagrams import DIAGRAMS, OVERVIEW
from drawing import COLOURS, INK, PAPER, Words, box, picture, text, title

from paddlenlp_galvatron.cost_model.simulate import StageTimes, timeline
from paddlenlp_galvatron.cost_model.weights import StateBytes
from paddlenlp_galvatron.plan import LayerStrategy, Precision
from paddlenlp_galvatron.plan.layout import own_chunks
from paddlenlp_galvatron.plan.mesh import Axis
from paddlenlp_galvatron.plan.schedule import Schedule, chunks_in_flight
from paddlenlp_galvatron.plan.strategy import DataParallel, runs

IMAGES = Path(__file__).parents[1] / "docs" / "images"
RANKS, DEGREES = 4, ((1, True), (2, True), (2, False), (4, True))
STAGES, MICRO_BATCHES, FORWARD, BACKWARD = 4, 6, 1.0, 2.0
PASSES = (("#8fd3c8", "#00695c"), ("#a9c8ec", "#1f4e8c"))  # forward and backward of each chunk
SHARDS = 8
PLAN = (  # of a model of 32 layers in two stages
    *[LayerStrategy(2, dp_type=DataParallel.ZERO2, recompute=True)] * 12,
    *[LayerStrategy(2, dp_type=DataParallel.ZERO2)] * 3,
    *[LayerStrategy(1, dp_type=DataParallel.ZERO3)] * 16,
    LayerStrategy(4, ulysses=True, dp_type=DataParallel.ZERO2),
)
SPLIT = 15

WORDS = {
    "en": {
        "groups": "Four ranks, one layer: who shares its work (one colour: one group)",
        "degree": "degree",
        "neighbours": "neighbours",
        "strided": "strided",
        "samples": "samples of a micro-batch in",
        "parts": "part(s)",
        "rank": "rank",
        "context": "Context parallelism over four ranks: the tokens of each rank",
        "sample": "one sample,",
        "pieces": "in 8 pieces",
        "schedule": "Four stages, six micro-batches: forward (light), backward (dark), idle (white)",
        "interleaved": "interleaved 1F1B, 2 chunks (green, blue)",
        "stage": "stage",
        "step": "units of time; stage 0 holds",
        "of": "micro-batches at once",
        "zero": "Bytes a weight on one of eight ranks that share it (bf16, AdamW)",
        "weight": "weight",
        "gradient": "gradient",
        "optimizer": "optimizer states",
        "plan": "One plan, 32 layers in two stages: every column is a layer, every colour a strategy",
        "weights": "weights over",
        "sequence": "sequence over",
        "whole": "not split",
        "recompute": "recompute",
        "layer": "layer",
    },
    "zh": {
        "groups": "四个 rank 与一层：谁与谁分担这一层（同色为一组）",
        "degree": "并行度",
        "neighbours": "相邻",
        "strided": "间隔",
        "samples": "微批次的样本分为",
        "parts": "份",
        "rank": "rank",
        "context": "四个 rank 的上下文并行：一个样本的 token 各在哪里",
        "sample": "一个样本，",
        "pieces": "分为 8 段",
        "schedule": "四个阶段、六个微批次：前向（浅色）、反向（深色）、空闲（白色）",
        "interleaved": "交错 1F1B，每个阶段 2 个模型块（绿、蓝）",
        "stage": "阶段",
        "step": "个时间单位；阶段 0 同时保留",
        "of": "个微批次的激活",
        "zero": "八个 rank 共有一个权重时，其中一个 rank 为它保存多少字节（bf16、AdamW）",
        "weight": "权重",
        "gradient": "梯度",
        "optimizer": "优化器状态",
        "plan": "一个方案：32 层分为两个阶段；每一列是一层，每种颜色是一种策略",
        "weights": "权重切分",
        "sequence": "序列切分",
        "whole": "不切分",
        "recompute": "重计算",
        "layer": "层",
    },
}


def main() -> int:
    check = "--check" in sys.argv[1:]
    stale = []
    for path, drawn in pictures():
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(drawn, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != drawn:
            stale.append(path)
    for path in stale:
        sys.stderr.write(f"{path}: differs from the code's drawing; renew it: make pages\n")
    return bool(stale)


def pictures() -> Iterator[tuple[Path, str]]:
    drawn: dict[str, Callable[[Words], str]] = {
        "groups": groups,
        "context": context,
        "schedule": schedule,
        "zero": zero,
        "plan": plan,
    }
    for language, words in WORDS.items():
        for name, draw in (drawn | DIAGRAMS).items():
            yield IMAGES / language / f"{name}.svg", draw(words if name in drawn else OVERVIEW[language])


def groups(words: Words) -> str:
    """Tensor-parallel groups of the rank grid."""
    parts = [title(words["groups"])]
    for row, (degree, consecutive) in enumerate(DEGREES):
        mesh, y = LayerStrategy(degree, consecutive=consecutive).mesh(RANKS), 56 + row * 62
        firsts = mesh.groups(Axis.TENSOR)[:, 0].tolist()
        kind = "" if degree in (1, RANKS) else f", {words['neighbours' if consecutive else 'strided']}"
        parts.append(text(16, y + 20, f"{words['degree']} {degree}{kind}"))
        parts.append(text(16, y + 38, f"{words['samples']} {mesh.degree(Axis.DATA)} {words['parts']}", 11))
        for rank in range(RANKS):
            colour = COLOURS[firsts.index(mesh.group(rank, Axis.TENSOR)[0])]
            parts.append(box(240 + rank * 100, y, 92, 44, colour))
            parts.append(text(286 + rank * 100, y + 27, f"{words['rank']} {rank}", 13, PAPER, "middle"))
    return picture(660, 56 + len(DEGREES) * 62, parts)


def context(words: Words) -> str:
    """Which sequence length each rank has."""
    parts = [title(words["context"]), text(16, 72, words["sample"]), text(16, 90, words["pieces"])]
    pieces = 2 * RANKS
    for rank in range(RANKS):
        for start, _ in own_chunks(rank, RANKS, pieces):
            x = 110 + start * 67
            parts.append(box(x, 56, 65, 44, COLOURS[rank]))
            parts.append(text(x + 32.5, 83, f"{words['rank']} {rank}", 13, PAPER, "middle"))
    return picture(660, 120, parts)


def schedule(words: Words) -> str:
    """The schedules on one scale."""
    parts, y = [title(words["schedule"])], 56
    kinds = {
        (Schedule.GPIPE, 1): Schedule.GPIPE.label,
        (Schedule.ONE_F_ONE_B, 1): Schedule.ONE_F_ONE_B.label,
        (Schedule.ONE_F_ONE_B, 2): words["interleaved"],
    }
    for (kind, chunks), name in kinds.items():
        places = STAGES * chunks
        forward, backward = [FORWARD / chunks] * places, [BACKWARD / chunks] * places
        times = StageTimes(forward, backward, [0.0] * STAGES, [0.0] * (places - 1))
        spans = timeline(kind, times, MICRO_BATCHES)
        step = max(span.stop_ms for span in spans)
        held = max(sum(each) for each in chunks_in_flight(kind, 0, STAGES, MICRO_BATCHES, chunks)) / chunks
        parts.append(text(16, y + 12, f"{name}: {step:g} {words['step']} {held:g} {words['of']}"))
        y += 22
        for span in spans:
            if span.work:
                x, width = 90 + span.start_ms * 21, (span.stop_ms - span.start_ms) * 21
                fore = span.work.kind == "forward"
                colour = PASSES[span.work.chunk][not fore]
                parts.append(box(x, y + span.stage * 26, width - 1, 23, colour, 2))
                ink = INK if fore else PAPER
                number = str(span.work.micro_batch)
                parts.append(text(x + width / 2, y + span.stage * 26 + 16, number, 11, ink, "middle"))
        parts += [text(16, y + stage * 26 + 16, f"{words['stage']} {stage}", 12) for stage in range(STAGES)]
        y += STAGES * 26 + 18
    return picture(690, y, parts)


def zero(words: Words) -> str:
    """Memory of a rank under ddp, zero2 and zero3."""
    states = StateBytes.of(Precision.BF16)
    parts = [title(words["zero"])]
    for row, kind in enumerate(DataParallel):
        y, x = 62 + row * 46, 90.0
        whole = {
            "weight": StateBytes(states.weight, 0, 0),
            "gradient": StateBytes(0, states.gradient, 0),
            "optimizer": StateBytes(0, 0, states.optimizer),
        }
        parts.append(text(16, y + 20, kind.value))
        total = 0.0
        for number, one in enumerate(whole.values()):
            held = one.held(kind, SHARDS, whole_gradients=False)
            parts.append(box(x, y, held * 30, 30, COLOURS[number], 2))
            x, total = x + held * 30, total + held
        parts.append(text(x + 8, y + 20, f"{total:g}"))
    for number, name in enumerate(("weight", "gradient", "optimizer")):
        parts += [
            box(90 + number * 150, 204, 14, 14, COLOURS[number], 2),
            text(110 + number * 150, 216, words[name], 12),
        ]
    return picture(660, 236, parts)


def plan(words: Words) -> str:
    """Layers by stage, coloured by strategy."""
    parts = [title(words["plan"])]
    kinds = list(dict.fromkeys(PLAN))
    for number, layer in enumerate(PLAN):
        stage = int(number >= SPLIT)
        parts.append(box(90 + number * 17.5, 60 + stage * 48, 15.5, 36, COLOURS[kinds.index(layer)], 2))
    parts += [text(16, 83 + stage * 48, f"{words['stage']} {stage}") for stage in (0, 1)]
    for number, (layers, layer) in enumerate(runs(PLAN)):
        y = 172 + number * 22
        split = words["whole"] if layer.degree == 1 else words["sequence" if layer.ulysses else "weights"]
        traits = [f"{split} {layer.degree}" if layer.degree > 1 else split, layer.dp_type.value]
        traits += [words["recompute"]] if layer.recompute else []
        span = f"{layers[0]}-{layers[-1]}" if len(layers) > 1 else str(layers[0])
        parts += [
            box(90, y, 14, 14, COLOURS[kinds.index(layer)], 2),
            text(112, y + 12, f"{words['layer']} {span}: {', '.join(traits)}", 12),
        ]
    return picture(690, 270, parts)


if __name__ == "__main__":
    sys.exit(main())
