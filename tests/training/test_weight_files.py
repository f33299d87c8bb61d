"""Which weights of a folder are read: those that transformers reads, or an error that says why not and what to do."""

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("paddle")

from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.plan import load_model
from paddlenlp_galvatron.training.checkpoint.adapters import base_identity
from paddlenlp_galvatron.training.checkpoint.convert import to_checkpoint
from paddlenlp_galvatron.training.checkpoint.huggingface import HuggingFaceWeights, modules
from paddlenlp_galvatron.training.checkpoint.loading import open_weights

from .weight_folders import FAULTS, HEAD, INDEX, OTHERS, PARTS, PREFIXES, QUANT, SINGLE, Folder

LEFT_OVER = Folder(parts=True, index=True, head="other")
SHARDED = Folder(single=False, parts=True, index=True, head="other")


def often(plain, *others):
    """`plain` in half of the draws, so that folders with one fault alone are drawn, too."""
    return st.just(plain) | st.sampled_from(others)


def folders() -> st.SearchStrategy[Folder]:
    return st.builds(
        Folder,
        single=st.booleans(),
        parts=st.booleans(),
        index=st.booleans(),
        fault=often("", *FAULTS),
        prefix=often("model.", *PREFIXES),
        quant=often("", *QUANT),
        head=st.sampled_from(["", "same", "other"]),
        tied=st.booleans(),
        others=st.lists(st.sampled_from(OTHERS), max_size=2).map(tuple),
    )


def opened(spec: Folder, folder: Path) -> HuggingFaceWeights:
    spec.write(folder)
    return HuggingFaceWeights(folder, load_model(folder))


def require_read(source: HuggingFaceWeights, spec: Folder, folder: Path) -> None:
    tensors = spec.tensors(spec.source)
    for weight in (weight for module in modules(load_model(folder)) for weight in module):
        stored = tensors[weight.tensor]
        assert (source(weight.name, weight.shape) == (stored.T if weight.transposed else stored)).all(), weight.name


@given(spec=folders())
def test_what_transformers_reads_is_read_or_refused(spec):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        try:
            source = opened(spec, folder)
        except UserError as error:
            assert not spec.is_right, (spec, error)
            assert all(fault.startswith(str(folder)) for fault in error.faults)
            assert len(error.faults) <= 2
        else:
            assert spec.is_right
            require_read(source, spec, folder)


REFUSED = {
    "an index without its tensor": (
        Folder(single=False, parts=True, index=True, fault="absent tensor", head="other"),
        rf"{PARTS[0]}: lacks tensor model.layers.0.self_attn.q_proj.bias, which {INDEX} names there: they are not of",
    ),
    "a tensor that the index lacks": (
        Folder(single=False, parts=True, index=True, fault="extra tensor", head="other"),
        rf"{PARTS[0]}: has tensor model.embed_tokens.weight, which {INDEX} does not name there",
    ),
    "a tensor in another part": (
        Folder(single=False, parts=True, index=True, fault="wrong part", head="other"),
        rf"{PARTS[0]}: has tensor model.embed_tokens.weight, which {INDEX} does not name there",
    ),
    "a part that is not there": (
        Folder(single=False, parts=True, index=True, fault="absent file", head="other"),
        rf"{PARTS[1]}: is missing, but {INDEX} names it; download the model again",
    ),
    "parts alone": (
        Folder(single=False, parts=True),
        rf"neither {SINGLE} nor {INDEX}; {PARTS[0]} is one of several parts, of which",
    ),
    "another head": (
        Folder(head="other", tied=True),
        rf"{SINGLE}: {HEAD} is not the embedding, which config.json says it is; write tie_word_embeddings: false",
    ),
    "no head": (Folder(), rf"lacks tensor {HEAD}, .* as tie_word_embeddings is false; .* write true there"),
    "no prefix": (
        Folder(prefix=""),
        r"has tensor embed_tokens.weight in place of model.embed_tokens.weight: .*AutoModel",
    ),
    "multimodal": (Folder(prefix="language_model.model."), r"a part of a multimodal model; save its language model"),
    "PEFT's": (Folder(prefix="base_model.model.model."), r"PEFT's, with adapters; save the result of merge_and_unload"),
    "in a wrapper": (Folder(prefix="_orig_mod.model."), r"saved within another module; save the model itself"),
    "nothing": (Folder(single=False), r"or begin with random ones: galvatron train --continue_training 0"),
    **{
        name: (Folder(single=False, others=(name,)), rf"neither {SINGLE} nor {INDEX}; {name} is .*; ")
        for name in OTHERS
    },
    **{
        name: (Folder(quant=name), rf"up_proj.{name}: its weights are quantised; take the model that") for name in QUANT
    },
}


@pytest.mark.parametrize(("spec", "message"), REFUSED.values(), ids=REFUSED)
def test_why_a_folder_is_refused_is_reported_with_the_remedy(spec, message, tmp_path):
    with pytest.raises(UserError, match=message):
        opened(spec, tmp_path / "model")


@pytest.mark.parametrize("spec", [LEFT_OVER, SHARDED, Folder(tied=True), Folder(tied=True, head="same")], ids=str)
def test_what_is_right_is_read(spec, tmp_path):
    require_read(opened(spec, tmp_path / "model"), spec, tmp_path / "model")


def test_a_tensor_of_fp8_without_its_scale_says_that_it_is_quantised(tmp_path):
    spec = Folder(head="other")
    spec.write(tmp_path / "model")
    save_file(spec.tensors(0) | {HEAD: np.zeros((11, 8), np.int8)}, tmp_path / "model" / SINGLE)
    with pytest.raises(UserError, match=f"tensor {HEAD} is of type I8; .* if the model is quantised, take the one"):
        HuggingFaceWeights(tmp_path / "model", load_model(tmp_path / "model"))


def test_another_file_that_config_names_is_refused(tmp_path):
    spec = Folder(head="other")
    spec.write(tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"transformers_weights": "other.safetensors"}))
    with pytest.raises(UserError, match=r"config.json: transformers_weights names 'other.safetensors'; model.safe"):
        HuggingFaceWeights(tmp_path / "model", load_model(tmp_path / "model"))


def identity(folder: Path) -> str:
    return base_identity(open_weights(folder, load_model(folder)))


def before(folder: Path) -> str:
    """As earlier versions had it: over every file of weights in the folder."""
    return " ".join(part for file in sorted(folder.glob("*.safetensors")) for part in [_sum(file)])


def _sum(file: Path) -> str:
    import zlib

    content = file.read_bytes()
    return f"{file.name}:{len(content)}:{zlib.crc32(content):08x}"


@pytest.mark.parametrize("spec", [Folder(head="other"), SHARDED, LEFT_OVER, Folder(tied=True, head="same")], ids=str)
def test_a_base_is_recognized_by_the_files_that_are_read(spec, tmp_path):
    folder = tmp_path / "model"
    spec.write(folder)
    known = identity(folder)
    if not (spec.single and spec.parts):  # a run of an earlier version continues
        assert known == before(folder)
    (folder / "adapter_model.safetensors").write_bytes(b"another's")
    save_file({"x": np.zeros(2)}, folder / "model-00003-of-00003.safetensors")
    assert identity(folder) == known
    read = folder / (SINGLE if spec.single else PARTS[1])
    content = bytearray(read.read_bytes())
    content[-1] ^= 1
    read.write_bytes(content)
    if not spec.tied:  # else the head no longer is the embedding
        assert identity(folder) != known


def test_a_checkpoint_as_base_is_recognized_by_its_own_files(tmp_path):
    spec = Folder(head="other")
    spec.write(tmp_path / "model")
    to_checkpoint(tmp_path / "model", load_model(tmp_path / "model"), tmp_path / "base", lambda _: None)
    known = identity(tmp_path / "base")
    assert known == before(tmp_path / "base")
    (tmp_path / "base" / "adapter_model.safetensors").write_bytes(b"another's")
    assert identity(tmp_path / "base") == known
