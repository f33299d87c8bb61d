"""The files next to a model's weights: config.json, generation config, tokenizer and templates.

A run writes the files that it trained with into each checkpoint; exports copy them from there.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from filecmp import cmp
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from ...base.reading import parse_json, read_json
from ...model import config_of, shape_from_config
from ...model.unsupported import MTP_COUNTS
from ...plan import ModelShape
from ..data.templates import PADDLENLP, Template, TurnTemplate
from ..data.tokenizer import TOKENIZER_CONFIG
from .weight_files import CONFIG

# Names of files in transformers and PaddleNLP; some models and tokenizers include code.
OF_MODEL = ("generation_config.json", "configuration_*.py", "modeling_*.py")
OF_TOKENIZER = (
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "tokenization_*.py"),
    *("vocab.*", "merges.txt", "*.model", "*.model.v*", "*.tiktoken", "tekken.json"),
)
TEMPLATES = ("chat_template.*", "additional_chat_templates/*.jinja")
TOKENIZER = "tokenizer.json"
A_LAYER_EACH = ("layer_types", "mlp_layer_types")  # lists in config.json
FURTHER = (*MTP_COUNTS, "mtp_num_layers")  # counts of layers for MTP


def config_file(model: str | Path | None) -> Path | None:
    """The config.json of a model that is a folder, or such a file; None: it is a preset."""
    path = Path(model or CONFIG)
    path = path / CONFIG if path.is_dir() else path
    return path if model is not None and path.is_file() else None


def companions(folder: Path | None, tokenizer: Path | None = None) -> dict[str, Path]:
    """The files of a model's directory that belong to its weights, besides config.json, by their names in it. Those of
    the tokenizer are from `tokenizer`, a folder or a tokenizer.json, if there is one."""
    single = {TOKENIZER: tokenizer} if tokenizer and tokenizer.is_file() else {}
    tokenizer = tokenizer.parent if tokenizer and single else tokenizer
    words = _matching(tokenizer, OF_TOKENIZER) | single
    model = _matching(folder, OF_MODEL if words else (*OF_MODEL, *OF_TOKENIZER, *TEMPLATES))
    return model | words | _matching(tokenizer, TEMPLATES)


def _matching(folder: Path | None, patterns: Iterable[str]) -> dict[str, Path]:
    paths = sorted({path for pattern in patterns for path in folder.glob(pattern)}) if folder else []
    return {str(path.relative_to(folder)): path for path in paths if folder and path.is_file()}


def unlike_companions(folder: Path, like: Path) -> list[str]:
    """Names of the companions that only one folder has, or that differ; empty if `folder` has none."""
    ours, other = companions(folder), companions(like)
    same = {name for name in ours.keys() & other.keys() if cmp(ours[name], other[name], shallow=False)}
    return sorted((ours.keys() | other.keys()) - same) if ours else []


def copy_companions(files: Mapping[str, Path], target: Path) -> None:
    """Copy files of `companions`, unchanged. Raises OSError."""
    for name, file in files.items():
        (target / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(file, target / name)


def with_template(files: Mapping[str, bytes], template: Template | None) -> dict[str, bytes]:
    """The files of a tokenizer with this chat template instead of any other; None: without a template. A Jinja template
    goes into tokenizer_config.json, which every version of transformers reads. Raises UserError."""
    kept = {name: content for name, content in files.items() if not any(fnmatch(name, each) for each in TEMPLATES)}
    config = parse_json(kept.get(TOKENIZER_CONFIG, b"{}").decode("utf-8-sig"), TOKENIZER_CONFIG)
    config.pop("chat_template", None)
    if isinstance(template, TurnTemplate):
        kept[PADDLENLP] = template.file
    elif template:
        config["chat_template"] = template.text
    return kept | {TOKENIZER_CONFIG: (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()}


def config_like(shape: ModelShape, path: Path | None) -> dict[str, Any]:
    """The config.json of a model: that at `path` with the entries that the shape changes, or a new one. Raises
    UserError."""
    config, now = (read_json(path) if path else {}), config_of(shape)
    if config.get("model_type") != shape.family:
        config = {**now, **{field: value for field, value in config.items() if field.endswith("_token_id")}}
    further = {field: shape.mtp_layers for field in FURTHER if config.get(field)}
    unread = ("dtype", *(A_LAYER_EACH if config["num_hidden_layers"] != shape.main_layers else ()))
    config = {field: value for field, value in config.items() if field not in unread}  # dtype: 5's torch_dtype
    for _ in range(2):  # one changed entry may be the default of another
        then = config_of(shape_from_config(config, shape.name, str(path)))
        changed = {field: value for field, value in now.items() if then.get(field) != value}
        if "rope_scaling" in changed:
            config.pop("rope_parameters", None)
            changed["rope_theta"] = shape.rope_theta
        if then.get("mlp_only_layers") != now.get("mlp_only_layers"):
            changed["decoder_sparse_step"] = 1
        config = {field: value for field, value in config.items() if field in now or field not in then} | changed
    return {"architectures": [f"{shape.traits.title}ForCausalLM"], "hidden_act": "silu"} | config | further


def without_absent_code(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """config.json without entries of auto_map whose file is not in the folder. `hub/model--file.Class` is of a hub."""

    def is_there(source: str | None) -> bool:
        return source is None or "--" in source or (folder / f"{source.split('.')[0]}.py").is_file()

    classes = (config.get("auto_map") or {}).items()
    code = {
        name: source for name, source in classes if all(map(is_there, source if isinstance(source, list) else [source]))
    }
    return {field: value for field, value in config.items() if field != "auto_map"} | (
        {"auto_map": code} if code else {}
    )
