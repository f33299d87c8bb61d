"""LoRA's adapters on disk: PEFT's and PaddleNLP's folders in and out, and merged into their base weights.

    tuned-adapters/
      adapter_config.json, adapter_model.safetensors               PEFT's
      lora_config.json, peft_model-00001-of-00001.safetensors, …   PaddleNLP's

PEFT keeps factors as linear layers, [rank, in] and [out, rank], under Hugging Face's names; PaddleNLP [in, rank] and
[rank, out] under its own. Folders written here have both; either can be read. PEFT's factors are of single experts or,
where transformers 5 has them in one parameter, of all experts of a layer (`FusedExperts`).
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, cast

import numpy as np
from safetensors import safe_open

from ...base.errors import UserError
from ...base.reading import LargeFile, read_json
from ...base.text import shortened
from ...base.writing import whole_folder, write_text
from ...model.lora import FACTORS, Adapters, factors_of
from ...plan import ModelShape, Precision
from ...runtime.weights import WHOLE, Array, Slice, WeightSource
from .companions import companions, config_like, copy_companions
from .convert import Advance, write_model
from .huggingface import HuggingFaceWeights
from .loading import CheckpointWeights
from .stored import INDEX, Checkpoint, open_checkpoint
from .weight_files import CONFIG as BASE_CONFIG
from .weight_files import Tensor, naming, require_finite, write_tensors

PEFT_CONFIG, PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
CONFIG = "lora_config.json"
WEIGHTS, SHARDS = "peft_model-00001-of-00001.safetensors", "peft_model.safetensors.index.json"
LARGEST = 3.38e38  # largest fp32 number that rounds to a finite bf16 number
BLOCKS = 16  # evenly spread blocks of a file of weights in its checksum
# Fields of a config that change the adapters' product, or the base that they name.
UNLIKE: dict[str, Any] = {
    **{"lora_dropout": 0, "bias": "none", "lora_bias": False, "lora_use_mixer": False, "peft_type": "LORA"},
    **dict.fromkeys(("modules_to_save", "layers_to_transform", "layer_replication")),
    **dict.fromkeys(("trainable_token_indices", "alora_invocation_tokens", "trainable_bias", "enable_lora_list")),
    **{"rank_pattern": {}, "alpha_pattern": {}, "fan_in_fan_out": False, "pissa": False, "loraga": False},
}
# Fields of LoRA variants; fields not listed only describe how plain factors were initialized or are computed.
VARIANT = re.compile(r"use_(?!rslora$|quick_lora$)\w+|(?!(eva|corda|loftq|lora_ga|megatron|runtime)_)\w+_config")
# Patterns in PEFT's config that may have an entry only for gate_up_proj, and types of their values.
PATTERNS: dict[str, tuple[type, ...]] = {"rank_pattern": (int,), "alpha_pattern": (int, float)}
# PEFT's init_lora_weights, in lower case, that leave the base as it is; pissa, olora, corda, loftq, lora_ga change it.
OF_THE_PLAIN_BASE = ("true", "false", "none", "gaussian", "eva", "orthogonal", "mica")


@dataclass(frozen=True)
class StoredFactor:
    """A factor under its names."""

    name: str  # PaddleNLP's
    shape: tuple[int, ...]
    peft: str
    expert: int | None = None  # number of the expert in its layer
    product: int = 0  # the expert's gate, up or down

    @property
    def projection(self) -> str:
        return self.name.split(".")[-2]

    @property
    def is_first(self) -> bool:
        return self.name.endswith(FACTORS[0])

    @property
    def fused(self) -> str:
        """PEFT's name of the factors of all experts of the layer; outside experts, of the factor."""
        if self.expert is None:
            return self.peft
        layer, factor = self.peft.split(".")[:5], self.peft.split(".")[-2:]
        return ".".join([*layer, "mlp.experts", *(["base_layer"] if self.product < 2 else []), *factor])


def stored_factors(shape: ModelShape, rank: int) -> Iterator[StoredFactor]:
    """All factors of a model's adapters."""
    for index in range(shape.layers):
        for weight in factors_of(shape.of(index).layer, rank).weights:
            name, product = f"layers.{index}.{weight.name}", 0
            if weight.expert is not None and shape.traits.mixture:
                product = shape.traits.mixture.projections.index(name.split(".")[-2])
            names = f"{shape.traits.prefix}.{name}", weight.shape, f"base_model.model.model.{name}.weight"
            yield StoredFactor(*names, weight.expert, product)


def base_identity(weights: HuggingFaceWeights | CheckpointWeights) -> str:
    """Identity of a set of base weights, independent of their path: from the files that are read. Raises UserError."""
    sums = ((file, LargeFile(file)) for file in weights.files)
    return " ".join(f"{file.name}:{large.size_bytes}:{large.checksum(BLOCKS):08x}" for file, large in sums)


class FusedExperts:
    """Factors of single experts from PEFT's of all experts of a layer, where transformers keeps these in one parameter
    (`target_parameters`).

    The lora_A of E experts is [E * rank, in], and lora_B [out, rank * E], its columns by rank, then by expert.
    Those of down_proj are named `experts`, and those of gate_up_proj `experts.base_layer`: outputs of gate, then of
    up, with one lora_A for both. Where PEFT made them from adapters of single experts, the first half of the ranks
    is gate's, the second half is up's, and lora_B is 0 in two quarters.
    """

    def __init__(self, read: Callable[[str], Array], experts: int, adapters: Adapters, config: dict[str, Any]):
        """`config`: PEFT's; entries of gate_up_proj are removed from its patterns. `read` gives a tensor."""
        patterns: dict[str, Any] = {}
        for name, kinds in PATTERNS.items():
            pattern: dict[str, Any] = config[name] if isinstance(config.get(name), dict) else {}
            for key in [key for key in pattern if key.endswith("gate_up_proj")]:
                if isinstance(pattern[key], kinds) and pattern[key] > 0:
                    patterns[name.removesuffix("_pattern")] = pattern.pop(key)
        self._read, self._experts, self._rank = lru_cache(maxsize=4)(read), experts, adapters.rank
        both = replace(adapters, **patterns)
        self._stored_rank, self._scale = both.rank, both.scaling / adapters.scaling
        self._halves = False

    def size(self, factor: StoredFactor) -> tuple[int, ...]:
        """Shape of the tensor that holds a factor."""
        inputs, outputs = factor.shape
        if factor.expert is None:
            return outputs, inputs
        columns = self._experts * (self._rank if factor.product == 2 else self._stored_rank)
        return (columns, inputs) if factor.is_first else (outputs * (1 if factor.product == 2 else 2), columns)

    def rank(self, factors: Iterable[StoredFactor]) -> int:
        """Rank of the adapters of gate and up of a single expert."""
        of_gate = [factor for factor in factors if factor.expert == 0 == factor.product and not factor.is_first]
        self._halves = self._stored_rank == 2 * self._rank and all(self._in_halves(each.fused) for each in of_gate)
        return self._rank if self._halves else self._stored_rank

    def _in_halves(self, name: str) -> bool:
        gate, up = np.split(self._read(name), 2)
        middle = gate.shape[1] // 2
        return not (gate[:, middle:].any() or up[:, :middle].any())

    def __call__(self, factor: StoredFactor) -> Array:
        """A factor of an expert as PaddleNLP has it."""
        tensor, both = self._read(factor.fused), factor.product < 2
        if factor.is_first:
            matrix = tensor.reshape(self._experts, -1, tensor.shape[1])[factor.expert].T
        else:
            matrix = tensor.reshape(tensor.shape[0], -1, self._experts)[:, :, factor.expert].T
            if both:
                matrix = np.split(matrix, 2, axis=1)[factor.product] * np.float32(self._scale)
        if both and self._halves:
            matrix = np.split(matrix, 2, axis=1 if factor.is_first else 0)[factor.product]
        return matrix


def peft_tensor(name: str, factors: list[StoredFactor], read: WeightSource) -> Tensor:
    """PEFT's tensor of the factors of all experts of a layer, gate's ranks before up's; or of a single factor."""
    products, (rows, columns), count = sorted({each.product for each in factors}), factors[0].shape, len(factors)
    is_first, last = factors[0].is_first, len(products) - 1

    def joined() -> Array:
        stacks = [np.stack([read(each.name, each.shape).T for each in factors if each.product == n]) for n in products]
        if is_first:
            return np.concatenate(stacks, 1).reshape(-1, rows)
        blocks = [np.pad(each, ((0, 0), (0, 0), (n * rows, (last - n) * rows))) for n, each in enumerate(stacks)]
        return np.concatenate(blocks, 1).transpose(1, 2, 0).reshape(-1, rows * count)

    return Tensor(name, (columns * count, rows) if is_first else (columns * len(products), rows * count), joined)


def targets(every: list[StoredFactor], adapters: Adapters) -> dict[str, Any]:
    """Fields of PEFT's config that name the adapted modules. When PEFT reads adapters of single experts on transformers
    5, it confuses other projections with the same names, and scales rsLoRA by the combined rank of gate and up; for
    these cases all experts of a layer are written as one."""
    of_experts = {factor.projection for factor in every if factor.expert is not None}
    others = [each for each in every if each.expert is None and each.projection in of_experts]
    modules = dict.fromkeys(factor.projection for factor in every)
    if not others and not (of_experts and adapters.rslora):
        return {"target_modules": list(modules)}
    parameters = [f"{'.'.join(factor.name.split('.')[-3:-1])}.weight" for factor in others]
    both, alpha = r".*\.gate_up_proj", adapters.alpha * (math.sqrt(2) if adapters.rslora else 2)
    return {
        "target_modules": [name for name in modules if name not in of_experts],
        "target_parameters": ["experts.gate_up_proj", "experts.down_proj", *dict.fromkeys(parameters)],
        **{"rank_pattern": {both: 2 * adapters.rank}, "alpha_pattern": {both: alpha}},
    }


class AdapterFolder:
    """Adapters that a folder holds, PEFT's, PaddleNLP's or a checkpoint's; a `WeightSource` of their factors."""

    def __init__(self, folder: Path, shape: ModelShape):
        """Raises UserError if there are none, or not for all projections of this model."""
        self._read: Callable[[StoredFactor], Array]
        self._fused: FusedExperts | None = None
        self._base = folder, ""  # the file that names the base, and its name
        if (folder / INDEX).exists():
            checkpoint = open_checkpoint(folder, shape)
            if checkpoint.index.adapters is None:
                raise UserError(f"{folder}: is a checkpoint of all weights, not of adapters; name it with --load")
            self.adapters = checkpoint.index.adapters
            weights = CheckpointWeights(checkpoint)
            self._read = lambda factor: weights(factor.name, factor.shape)
        else:
            self.adapters = self._open(folder, shape.experts)
        self._factors = {factor.name: factor for factor in stored_factors(shape, self.adapters.rank)}
        if not (folder / INDEX).exists():
            self._require_all()
        self.rank_of_experts = self._fused.rank(self._factors.values()) if self._fused else self.adapters.rank

    def __call__(self, name: str, shape: tuple[int, ...], rank_slice: Slice = WHOLE) -> Array:
        return rank_slice.of(self._read(self._factors[name]))

    def _open(self, folder: Path, experts: int) -> Adapters:
        peft = (folder / PEFT_CONFIG).exists()
        path = folder / (PEFT_CONFIG if peft else CONFIG)
        if not path.exists():
            raise UserError(f"{folder}: holds no adapters: neither {PEFT_CONFIG} nor {CONFIG} nor a checkpoint")
        content = read_json(path)
        config: dict[str, Any] = content if isinstance(content, dict) else {}
        self._file, self._peft, self._read = self._weights_of(folder, peft), peft, self._from_file
        with naming(self._file):
            self._tensors = cast(Any, safe_open(self._file, framework="numpy"))
            self._names = set(self._tensors.keys())
        rank, alpha = config.get("r"), config.get("lora_alpha")
        counts = type(rank) is int and rank > 0 and type(alpha) in (int, float) and 0 < float(str(alpha)) < math.inf
        scaled = config.get(flag := "use_rslora" if peft else "rslora")
        adapters = Adapters(int(str(rank)), float(str(alpha)), bool(scaled)) if counts else Adapters(1, 1.0)
        if experts and any(".experts.lora_" in name for name in self._names):
            self._fused = FusedExperts(self._tensor, experts, adapters, config)
        variants = {name: False if name.startswith("use_") else None for name in config if VARIANT.fullmatch(name)}
        faults = [
            f"{path}: {name} is {shortened(str(config[name]))}, but {plain} alone is supported"
            for name, plain in (variants | UNLIKE).items()
            if config.get(name, plain) not in (plain, None)
        ]
        if str(begun := config.get("init_lora_weights")).lower() not in OF_THE_PLAIN_BASE:
            faults.append(f"{path}: init_lora_weights is {begun}, which may change the base; save them for a plain one")
        if not counts:
            faults.append(f"{path}: r and lora_alpha must be numbers above 0")
        if scaled not in (None, True, False):
            faults.append(f"{path}: {flag} is {scaled!r}; write true or false")
        if faults:
            raise UserError(faults)
        self._base = path, str(config.get("base_model_name_or_path") or "")
        return adapters

    def adapts(self, module: str) -> bool:
        """Whether it adapts a linear layer, by PaddleNLP's name."""
        return f"{module}.{FACTORS[0]}" in self._factors

    def base_note(self, base: Path) -> str:
        """A note if the adapters name another base; "": this base or none."""
        path, name = self._base
        named = read_json(base / BASE_CONFIG).get("_name_or_path") if (base / BASE_CONFIG).is_file() else ""
        if not name or _names(name) & (_names(base.absolute()) | _names(named)):
            return ""
        return f"{path}: base_model_name_or_path is {name}, and the base is {base}: are they the same?"

    @staticmethod
    def _weights_of(folder: Path, peft: bool) -> Path:
        names = [PEFT_WEIGHTS] if peft else [file.name for file in sorted(folder.glob("peft_model*.safetensors"))]
        if len(names) != 1 or not (folder / names[0]).exists():
            raise UserError(
                f"{folder}: needs one file {PEFT_WEIGHTS if peft else WEIGHTS}; save adapters as safetensors, in one"
            )
        return folder / names[0]

    def _tensor(self, name: str) -> Array:
        array: Array = np.asarray(self._tensors.get_tensor(name), np.float32)
        require_finite(array, self._file, name)
        return array

    def _from_file(self, factor: StoredFactor) -> Array:
        if self._fused and factor.expert is not None:
            return np.ascontiguousarray(self._fused(factor))
        return np.ascontiguousarray(self._tensor(factor.peft).T) if self._peft else self._tensor(factor.name)

    def _place(self, factor: StoredFactor) -> tuple[str, tuple[int, ...]]:
        """Name and shape of the tensor that a factor is in."""
        if self._fused:
            return factor.fused, self._fused.size(factor)
        return (factor.peft, factor.shape[::-1]) if self._peft else (factor.name, factor.shape)

    def _require_all(self) -> None:
        wanted, has = dict(map(self._place, self._factors.values())), self._names
        faults = [
            f"{self._file}: lacks {name}; adapters of all projections are needed" for name in wanted if name not in has
        ]
        for name in sorted(has - wanted.keys()):
            why = "; routers get no adapters" if "gate.lora_" in name else ""
            faults.append(f"{self._file}: has {name}, which is no adapter of this model{why}")
        for name in wanted.keys() & has:
            if (size := tuple(self._tensors.get_slice(name).get_shape())) != wanted[name]:
                faults.append(f"{self._file}: {name} has shape {size}; is it of another model?")
        if faults:
            raise UserError(faults[:3])


def _names(model: str | Path) -> set[str]:
    """Names of a model by its path: its folder, or its repository in a hub's cache."""
    parts = Path(str(model).lower()).parts
    return {*parts[-1:], *(folder.split("--")[-1] for folder in parts if folder.startswith("models--"))}


def open_adapters(folder: Path, shape: ModelShape, wanted: Adapters) -> AdapterFolder:
    """Initial adapters. Raises UserError if their rank or scale differs from the run's."""
    opened_folder = AdapterFolder(folder, shape)
    has, want = ((adapters.rank, adapters.scaling) for adapters in (opened_folder.adapters, wanted))
    if has != want:
        raise UserError(
            f"lora_path: {folder}: its adapters have rank {has[0]} and count {has[1]:g}, but those of the run "
            f"{want[0]} and {want[1]:g}; give its lora_rank, lora_alpha and rslora"
        )
    if opened_folder.rank_of_experts != wanted.rank:
        raise UserError(
            f"lora_path: {folder}: adapters of gate_up_proj have rank {opened_folder.rank_of_experts}, the others "
            f"{wanted.rank}; train on from the merged model: galvatron convert merge"
        )
    return opened_folder


def write_adapters(checkpoint: Checkpoint, target: Path, like: Path | None = None) -> None:
    """A checkpoint of adapters as a folder that PEFT and PaddleNLP read, with the tokenizer next to it, or that of the
    folder `like`. Raises UserError, or GalvatronError for a full disk."""
    adapters, weights = checkpoint.index.adapters, CheckpointWeights(checkpoint)
    assert adapters is not None
    every = list(stored_factors(checkpoint.shape, adapters.rank))
    targeted, groups = targets(every, adapters), defaultdict(list)
    for factor in every:
        groups[factor.fused if "target_parameters" in targeted else factor.peft].append(factor)

    about = checkpoint.folder / BASE_CONFIG
    base = read_json(about).get("_name_or_path") if about.is_file() else None
    if not base:
        sys.stderr.write("note: base_model_name_or_path is null, as their base has no name: name it as you load them\n")
    with whole_folder(target) as folder:
        copy_companions(companions(like or checkpoint.folder), folder)
        peft = [peft_tensor(name, factors, weights) for name, factors in groups.items()]
        write_tensors(folder / PEFT_WEIGHTS, peft, Precision.FP32)
        common: dict[str, Any] = {"r": adapters.rank, "lora_alpha": adapters.alpha, "lora_dropout": 0.0}
        common["base_model_name_or_path"] = base
        config = common | {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "fan_in_fan_out": False}
        config |= targeted | {"use_rslora": adapters.rslora, "inference_mode": True}
        write_text(folder / PEFT_CONFIG, json.dumps(config, indent=2) + "\n")
        plain = [Tensor(factor.name, factor.shape, partial(weights, factor.name, factor.shape)) for factor in every]
        facts = write_tensors(folder / WEIGHTS, plain, Precision.FP32, framework="np")
        index = {"metadata": {"total_size": facts.bytes}, "weight_map": {factor.name: WEIGHTS for factor in every}}
        write_text(folder / SHARDS, json.dumps(index, indent=2) + "\n")
        config = common | {"rslora": adapters.rslora, "tensor_parallel_degree": -1, "dtype": "float32"}
        config |= {"target_modules": [f".*{name}.*" for name in dict.fromkeys(each.projection for each in every)]}
        write_text(folder / CONFIG, json.dumps(config, indent=2) + "\n")


def merge(base: Path, adapters: Path, shape: ModelShape, target: Path, shard_bytes: int, advance: Advance) -> list[str]:
    """Write a Hugging Face directory of the base's weights with the adapters added, one weight in memory at a time,
    with their tokenizer if they have one; returns notes for the user. Raises UserError: the adapters were trained on
    another base, or numbers are not finite."""
    weights, tuned = HuggingFaceWeights(base, shape), AdapterFolder(adapters, shape)
    learnt = False
    base_name = tuned.adapters.base
    if base_name and base_name != base_identity(weights):
        raise UserError(f"{adapters}: were trained on other weights than those in {base}; name their base")

    def merged(name: str, size: tuple[int, ...]) -> Array:
        array, module = weights(name, size), name.removesuffix(".weight")
        if not tuned.adapts(module):
            return array
        first, second = (tuned(f"{module}.{factor}", ()) for factor in FACTORS)
        nonlocal learnt
        learnt = learnt or bool(second.any())
        with np.errstate(over="ignore", invalid="ignore"):
            total: Array = array + tuned.adapters.scaling * (first @ second)
        if not np.abs(total).max() < LARGEST:
            raise UserError(f"{adapters}: {name} with them has numbers that are NaN or infinite; is lora_alpha right?")
        return total

    config, files = config_like(shape, base / BASE_CONFIG), companions(base, adapters)
    write_model(shape, merged, target, config, (weights.precision, weights.precisions), shard_bytes, files, advance)
    zero = "" if learnt else f"{adapters}: all lora_B are 0, so the result is the base; were they trained?"
    return [note for note in (tuned.base_note(base), zero) if note]
