"""Derives entries from a file's raw runs, as Galvatron's profilers (and the PaddleNLP port's) do after all runs.

Both functions return missing entries of the file in its form and units.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Dialect = Literal["galvatron", "paddlenlp"]
LARGEST = 1e12  # above any measured ms, MiB or MiB/ms
_ONE = r"[1-9]\d{0,5}"
_EACH = rf"{_ONE}(?:,\s*{_ONE}){{0,15}}"  # a number a layer type
SEQ = rf"{_ONE}|\[{_EACH}\]"
TIME_RUN = re.compile(rf"layernum\[({_EACH})\](?:_bsz({_ONE}))?(?:_seq({SEQ}))?")
MEMORY_RUN: dict[Dialect, re.Pattern[str]] = {
    "galvatron": re.compile(rf"({_ONE})_({_ONE})_({_ONE})(_vtp)?(_c)?(_sp)?"),
    "paddlenlp": re.compile(rf"({_ONE})_({_ONE})_({_ONE})_(True|False)"),
}
_CELL = re.compile(TIME_RUN.pattern + r"_(rank\d+|first|last)_(ms|act|act_peak)")
# States of one parameter in a run by its share in `parameter_size`: 16 of 4 bytes, 18 of 2.
STATES_A_SIZE: dict[Dialect, int] = {"galvatron": 4, "paddlenlp": 9}
FILLED_DEGREES = (2, 4, 8)  # if not run, half of the previous degree

Layers = tuple[int, ...]  # number of layers of each type in a run


class RunPoint(NamedTuple):
    """Batch and length of runs to compare."""

    batch: int  # samples
    seq: str  # as in the key: a number, a list, or nothing


def derived_times(content: Mapping[str, Any]) -> tuple[dict[str, float], list[str]]:
    """Entries `layertype_…` for types without a time in the file, and the runs without an entry.

    A layer takes the additional time of a run with more layers of its type; the rest is all but the layers.
    """
    runs: dict[RunPoint, dict[Layers, float]] = {}
    for key, value in content.items():
        if (match := TIME_RUN.fullmatch(key)) and match[2] and is_number(value):
            runs.setdefault(RunPoint(int(match[2]), match[3] or ""), {})[_layers(match[1])] = float(value)
    entries: dict[str, float] = {}
    useless: list[str] = []
    for point, times in runs.items():
        where, lengths = _suffix(point), re.findall(r"\d+", point.seq)
        base, longer = _compared(times)
        layer_ms = [(times[more] - times[base]) / point.batch / (more[i] - base[i]) for i, more in enumerate(longer)]
        if not layer_ms or min(layer_ms) <= 0:
            useless.append(f"layernum[…]{where}")
            continue
        for i, ms in enumerate(layer_ms):
            entries[
                f"layertype_{i}" + _suffix(RunPoint(point.batch, lengths[i] if i < len(lengths) else point.seq))
            ] = ms
        spent = sum(n * ms for n, ms in zip(base, layer_ms, strict=True))
        entries["layertype_other" + where] = max(times[base] / point.batch - spent, 0.0)
    kinds = {kind_of(key) for key in content}
    return {key: ms for key, ms in entries.items() if kind_of(key) not in kinds}, useless


def derived_memory(content: Mapping[str, Any], dialect: Dialect) -> dict[str, Any]:
    """Entries `layertype_…` and `other_memory_…` for keys that the file lacks."""
    runs = list(_runs(content, dialect))
    result: dict[str, dict[str, Any]] = {}
    for sp in sorted({run.sp for run in runs}):
        chosen = [run for run in runs if run.sp == sp]
        for seq in dict.fromkeys(point.seq for run in chosen for point in run.cells):
            for key, entry in _derive(chosen, seq, dialect).items():
                lengths = re.findall(r"\d+", seq)
                layer = re.fullmatch(r"layertype_(\d+)", key)
                length = lengths[int(layer[1])] if layer and int(layer[1]) < len(lengths) else seq
                name = key + "_sp" * sp
                if name not in content:
                    result.setdefault(name, {})[length] = entry
    return {key: lengths.get("", lengths) for key, lengths in result.items()}


@dataclass(frozen=True)
class _Run:
    """One strategy's runs. All of them under ZeRO-3, as the profilers run them."""

    pp: int
    tp: int
    dp: int
    vocab_split: bool
    recompute: bool
    sp: bool
    cells: dict[RunPoint, dict[Layers, dict[str, float]]] = field(default_factory=dict)  # -> MiB of first_ms, …

    def at(self, seq: str) -> tuple[int, Mapping[Layers, Mapping[str, float]]]:
        """Batch and runs of the smallest batch at a length."""
        point = min((point for point in self.cells if point.seq == seq), default=RunPoint(1, seq))
        return point.batch, self.cells.get(point, {})


def _runs(content: Mapping[str, Any], dialect: Dialect) -> Iterator[_Run]:
    for key, value in content.items():
        match = MEMORY_RUN[dialect].fullmatch(key)
        if not match or not isinstance(value, dict):
            continue
        pp, tp, dp = (int(match[i]) for i in (1, 2, 3))
        if dialect == "galvatron":
            run = _Run(pp, tp, dp, bool(match[4]), bool(match[5]), bool(match[6]))
        else:
            run = _Run(pp, tp, dp, vocab_split=True, recompute=match[4] == "True", sp=False)
        for name, mib in value.items():
            cell = _CELL.fullmatch(name)
            if not cell or not cell[2] or not is_number(mib):
                continue
            point = RunPoint(int(cell[2]), cell[3] or "")
            numbers = run.cells.setdefault(point, {}).setdefault(_layers(cell[1]), {})
            for end in _ends(cell[4], pp * tp * dp):
                numbers[f"{end}_{cell[5]}"] = float(mib)
        yield run


def _ends(rank: str, world_size: int) -> list[str]:
    """The end of the pipeline that a rank stands for."""
    names = {"rank0": "first", f"rank{world_size - 1}": "last"} if world_size > 1 else {}
    return ["first", "last"] if rank == "rank0" and world_size == 1 else [names.get(rank, rank)]


def _derive(runs: list[_Run], seq: str, dialect: Dialect) -> dict[str, Any]:
    """Entries at one sequence length, with or without Megatron-SP."""
    types = max((len(layers) for run in runs for layers in run.at(seq)[1]), default=0)
    states: dict[int, list[float]] = {}  # tp -> states of a layer of each type on its ranks, unsharded
    kept: dict[int, list[float]] = {}  # tp -> activations of a layer of each type, per sample
    checkpoint: list[list[float]] = []
    for run in runs:
        batch, cells = run.at(seq)
        base, longer = _compared(cells)
        needed = [cells[layers] for layers in (base, *longer)] if longer else []
        if run.pp > 1 or (run.vocab_split and dialect == "galvatron") or not needed:
            continue
        if not all({"first_ms", "first_act"} <= set(numbers) for numbers in needed):
            continue

        def a_layer(name: str, cells: Any = cells, base: Layers = base, longer: Any = longer) -> list[float]:
            return [(cells[more][name] - cells[base][name]) / (more[i] - base[i]) for i, more in enumerate(longer)]

        samples = batch / run.dp  # samples of a rank
        activation = [mib / samples for mib in a_layer("first_act")]
        if run.recompute:
            checkpoint.append(activation)
        else:
            states[run.tp] = [mib * run.dp for mib in a_layer("first_ms")]
            kept[run.tp] = activation
    entries: dict[str, Any] = {}
    halved = dialect == "paddlenlp" or any(run.sp for run in runs)
    for i in range(types if states else 0):
        size = max(tp * mib[i] for tp, mib in states.items()) / STATES_A_SIZE[dialect]
        activations: dict[str, float] = _filled({tp: max(mib[i], 0.0) for tp, mib in kept.items()}, halved)
        if checkpoint:
            activations["checkpoint"] = max(max(mib[i] for mib in checkpoint), 0.0)
        entries[f"layertype_{i}"] = {"parameter_size": size, "tp_activation_per_bsz_dict": activations}
    return entries | _vocabulary(runs, seq, dialect, states, kept, halved)


def _vocabulary(
    runs: list[_Run],
    seq: str,
    dialect: Dialect,
    states: Mapping[int, list[float]],
    kept: Mapping[int, list[float]],
    halved: bool,
) -> dict[str, Any]:
    """Memory of a stage's first and last rank without their layers: the least of all runs, in the port the most."""
    chosen = max if dialect == "paddlenlp" else min
    entries: dict[str, dict[str, dict[int, float]]] = {}
    for run in runs:
        batch, cells = run.at(seq)
        if run.recompute or run.tp not in states or not cells:
            continue
        layers = min(cells) if run.pp == 1 else (run.pp,) * len(states[run.tp])
        numbers = cells.get(layers, {})
        degree = run.tp if run.vocab_split else 1
        ranks = run.dp * run.tp // degree  # ranks that share the vocabulary layers' states and the samples
        for end, key in (("first", "on_first" if run.pp > 1 else "off"), ("last", "on_last")):
            if (run.pp == 1 and end == "last") or not {f"{end}_ms", f"{end}_act"} <= set(numbers):
                continue
            peak = max(numbers[f"{end}_act"], numbers.get(f"{end}_act_peak", 0.0))
            if dialect == "paddlenlp" and run.pp == 1:
                peak = numbers[f"{end}_act"]  # the port's profiler's entry
            stage = _stage(layers, run.pp, 0 if end == "first" else run.pp - 1)
            states_mib = sum(states[run.tp][kind] for kind in stage) / run.dp
            activation = sum(kept[run.tp][kind] for kind in stage) * batch / run.dp
            values = {
                "model_states": (numbers[f"{end}_ms"] - states_mib) * ranks,
                "activation": (peak - activation) * ranks / batch,
            }
            entry = entries.setdefault(f"other_memory_pp_{key}", {"model_states": {}, "activation": {}})
            for name, mib in values.items():
                entry[name][degree] = chosen(entry[name].get(degree, mib), max(mib, 0.0))
    return {key: {name: _filled(mib, halved) for name, mib in entry.items()} for key, entry in entries.items()}


def _stage(layers: Layers, pp: int, stage: int) -> list[int]:
    """Types of the layers of a stage, if all layers in order are divided evenly."""
    row = [kind for kind, number in enumerate(layers) for _ in range(number)]
    each = len(row) // pp
    return row[stage * each : (stage + 1) * each]


def _filled(by_degree: Mapping[int, float], halved: bool) -> dict[str, float]:
    result = dict(sorted(by_degree.items()))
    for degree in FILLED_DEGREES if halved else ():
        if degree not in result and degree // 2 in result:
            result[degree] = result[degree // 2] / 2
    return {str(degree): mib for degree, mib in result.items()}


def _compared(runs: Mapping[Layers, object]) -> tuple[Layers, list[Layers]]:
    """The shortest model, and for each type the model with more layers of only this type; empty if one is missing."""
    base = min(runs, default=())
    longer = []
    for i in range(len(base)):
        more = [
            n for n in runs if len(n) == len(base) and n[i] > base[i] and n[:i] + n[i + 1 :] == base[:i] + base[i + 1 :]
        ]
        if not more:
            return base, []
        longer.append(max(more))
    return base, longer


def _layers(text: str) -> Layers:
    return tuple(int(number) for number in text.split(","))


def _suffix(point: RunPoint) -> str:
    return f"_bsz{point.batch}" + (f"_seq{point.seq}" if point.seq else "")


def kind_of(key: str) -> str:
    """The subject of a key without its batch and length: layertype_0, layertype_other."""
    return "_".join(key.split("_")[:2])


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= LARGEST
