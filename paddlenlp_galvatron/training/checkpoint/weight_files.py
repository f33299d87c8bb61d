"""Which files of a Hugging Face directory hold its weights, as transformers 5 chooses them; why others are refused."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

from ...base.errors import UserError
from ...base.reading import read_json
from ...plan import ModelShape
from .tensor_file import opened

CONFIG, SINGLE, SHARDS = "config.json", "model.safetensors", "model.safetensors.index.json"
LM_HEAD = "lm_head.weight"
BUFFERS = "rotary_emb.inv_freq"  # computed, not trained: old files have them
SAVE = "save it by save_pretrained(..., safe_serialization=True)"
# Other files with weights: pattern of their names -> their kind and the remedy; the first that fits counts.
OTHERS = {
    "pytorch_model*.bin*": f"PyTorch's pickles; load the model with transformers and {SAVE}",
    "*.pdparams*": f"Paddle's own format; load the model with PaddleNLP and {SAVE}",
    "*.gguf": "of llama.cpp; take the Hugging Face model that it was made from",
    "adapter_model.*": "adapters alone; name the folder of their base",
    "peft_model*": "adapters alone; name the folder of their base",
    "consolidated*": "in its author's own layout; take the files of the model that transformers reads",
    "model-*-of-*.safetensors": f"one of several parts, of which {SHARDS} says what each holds; download that, too",
    "*.safetensors": f"under a name that transformers does not read; if it is the whole model, rename it to {SINGLE}",
    "*.distcp": "a training checkpoint of PyTorch's; export the model with the program that trained it",
    "mp_rank_*": "a training checkpoint of DeepSpeed or Megatron; export the model with the program that trained it",
    "*.h5": "TensorFlow's; take the model in safetensors",
    "*.msgpack": "Flax's; take the model in safetensors",
    "*model*.bin": f"PyTorch's pickles; load the model with transformers and {SAVE}",
    "*.pth": f"PyTorch's pickles; load the model with transformers and {SAVE}",
}
# Tensors next to the weights of fp8, GPTQ, AWQ, bitsandbytes, compressed-tensors, AQLM, MXFP4, PaddleNLP's weight-only.
QUANTISED = re.compile(
    r"(^|[._])(scales?|scale_inv|scale_2|qweight|qzeros|g_idx|SCB|absmax|packed|zero_point|weight_(shape|format)|codes"
    r"|codebooks|blocks|(nested_)?quant_.*)$"
)
# Prefixes of names: a part of them -> their program and the remedy; "": of anything else.
WRAPPERS = {
    "language_model": "a part of a multimodal model; save its language model alone",
    "base_model": "PEFT's, with adapters; save the result of merge_and_unload()",
    "": "saved within another module; save the model itself",
}
HEADLESS = "saved without a language model's class; load it by AutoModelForCausalLM and save that"


def tensor_files(folder: Path) -> dict[str, Path]:
    """The file of each tensor. Raises UserError: there is none, or an index says otherwise than its files."""
    config = read_json(folder / CONFIG)
    if isinstance(config, dict) and (other := config.get("transformers_weights")) is not None:
        raise UserError(f"{folder / CONFIG}: transformers_weights names {other!r}; {SINGLE} or {SHARDS} alone is read")
    single, index = folder / SINGLE, folder / SHARDS
    if single.is_file():  # an index in its folder was left over, for transformers as well
        return dict.fromkeys(sorted(_names(single)), single)
    if not index.is_file():
        raise UserError(f"{folder}: has neither {SINGLE} nor {SHARDS}; {_instead(folder)}")
    places = _places(index)
    for name in sorted(set(places.values())):
        file = folder / name
        if not file.is_file():
            raise UserError(f"{file}: is missing, but {SHARDS} names it; download the model again")
        has, named = _names(file), {tensor for tensor, stored_in in places.items() if stored_in == name}
        for tensor in sorted(has ^ named):
            has_it, says = ("lacks", "names") if tensor in named else ("has", "does not name")
            raise UserError(
                f"{file}: {has_it} tensor {tensor}, which {SHARDS} {says} there: they are not of one model; download "
                "or save it again"
            )
    return {tensor: folder / name for tensor, name in places.items()}


def without_absent_mtp(shape: ModelShape, folder: Path) -> ModelShape:
    """The model without MTP if a directory's weights have none: transformers drops them, but not from config.json."""
    if not shape.mtp_layers or not any((folder / name).is_file() for name in (SINGLE, SHARDS)):
        return shape
    place = f".layers.{shape.main_layers}."
    return shape if any(place in tensor for tensor in tensor_files(folder)) else shape.having(shape.main_layers, 0)


def require_plain(unknown: Iterable[str], folder: Path) -> None:
    """Raise UserError for a tensor that a quantised model has in addition to its weights."""
    for tensor in unknown:
        if QUANTISED.search(tensor):
            raise UserError(
                f"{folder}: has tensor {tensor}: its weights are quantised; take the model that they were made from"
            )


def require_unwrapped(unknown: Iterable[str], wanted: str, folder: Path) -> None:
    """Raise UserError if a tensor that is looked for has another prefix, as those of a model within another have."""
    name = wanted if wanted == LM_HEAD else wanted.partition(".")[2]
    for tensor in unknown:
        if tensor == name or tensor.endswith(f".{name}"):
            prefix = tensor.removesuffix(name)
            whose = next(whose for part, whose in WRAPPERS.items() if part in prefix) if prefix else HEADLESS
            raise UserError(f"{folder}: has tensor {tensor} in place of {wanted}: {whose}")


def _names(file: Path) -> set[str]:
    with opened(file) as tensors:
        return {name for name in tensors.keys() if not name.endswith(BUFFERS)}  # noqa: SIM118


def _places(index: Path) -> dict[str, str]:
    content = read_json(index)
    places = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(places, dict) or not places:
        raise UserError(f"{index}: weight_map is missing, which says where tensors are; download the file again")
    for tensor, name in places.items():
        if not isinstance(name, str) or not name or Path(name).name != name:
            raise UserError(f"{index}: weight_map: tensor {tensor} is in {name!r}, which is no file's name")
    return {tensor: name for tensor, name in places.items() if not tensor.endswith(BUFFERS)}


def _instead(folder: Path) -> str:
    """The files with weights that are there, and what to do."""
    names = sorted(path.name for path in folder.iterdir())
    for pattern, remedy in OTHERS.items():
        if matches := [name for name in names if fnmatch(name, pattern)]:
            return f"{matches[0]} is {remedy}"
    return "complete the download, or begin with random ones: galvatron train --continue_training 0"
