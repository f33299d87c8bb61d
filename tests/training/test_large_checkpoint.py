"""The cost of checkpoints for a rank: reads and copies; of 1,024 ranks bytes of the index, files that are opened,
parts that are compared."""

import pickle
from collections import Counter
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("paddle")

import paddle

from paddlenlp_galvatron.plan import ModelShape
from paddlenlp_galvatron.runtime import device
from paddlenlp_galvatron.runtime.weights import WHOLE, Slice
from paddlenlp_galvatron.training.checkpoint import loading, saving
from paddlenlp_galvatron.training.checkpoint.loading import WeightPiece
from paddlenlp_galvatron.training.checkpoint.stored import (
    MOMENTS,
    WEIGHT,
    BrokenCheckpoint,
    open_checkpoint,
    write_index,
)

RANKS, TP = 1024, 8
DP = RANKS // TP
# A sixteenth of Llama 7B's width and a quarter of its layers, in as many files.
SHAPE = ModelShape("narrow", "llama", 8, 256, 688, 32, 32, 2048, 4096)


def weights_of(shape, index):
    """Matrices of a layer by name, shape and axis that tp splits."""
    prefix = f"llama.layers.{index}."
    return [(prefix + each.name, each.shape, each.axis) for each in shape.block.weights if len(each.shape) > 1]


def units(shape):
    """Matrices of each module, and the vectors."""
    one = [(f"llama.{w.name}", w.shape, w.axis) for w in shape.embedding.weights]
    norm, head = shape.head.weights
    layers = range(shape.layers)
    vectors = [(f"llama.layers.{k}.{w.name}", w.shape) for k in layers for w in shape.block.weights if w.axis is None]
    modules = [one, *(weights_of(shape, index) for index in layers), [(head.name, head.shape, head.axis)]]
    return modules, [*vectors, (f"llama.{norm.name}", norm.shape)]


def parts_of_rank(rank):
    """By zero3 over all ranks that share a tp slice, in trainables: one a module; the first rank has the vectors."""
    tp, dp = rank % TP, rank // TP
    modules, vectors = units(SHAPE)
    tensors = []
    for module in modules:
        sizes = [int(np.prod(shape)) // TP for _, shape, _ in module]
        length = -(-sum(sizes) // DP)
        low, high, offset, parts = dp * length, (dp + 1) * length, 0, []
        for (name, shape, axis), size in zip(module, sizes, strict=True):
            start, stop = max(low, offset), min(high, offset + size)
            if start < stop:
                piece = WeightPiece(name, shape, Slice(axis, tp, TP), start - offset, stop - offset)
                parts.append((piece, start - low))
            offset += size
        tensors.append(parts)
    if rank == 0:
        tensors += [[(WeightPiece(name, shape, WHOLE, 0, shape[0]), 0)] for name, shape in vectors]
    return tensors


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("large")
    files = []
    for rank in range(RANKS):
        tensors = [
            {"key": f"{number:05d}", "parts": [asdict(part) | {"offset": offset} for part, offset in parts]}
            for number, parts in enumerate(parts_of_rank(rank))
        ]
        files.append({"file": f"rank-{rank:05d}.safetensors", "bytes": 2**40, "crc32": 0, "tensors": tensors})
    index = {
        "format": 2, "step": 1, "model": asdict(SHAPE), "model_fingerprint": SHAPE.fingerprint, "plan": {},
        "optimizer": {}, "loss_scale": None, "data": None, "files": files,
    }  # fmt: skip
    write_index(folder, index)
    return open_checkpoint(folder, SHAPE)


class Numbers:
    """An array of any length, all 0."""

    def get_slice(self, key):
        return self

    def get_shape(self):
        return [2**40]

    def get_dtype(self):
        return "F32"

    def __getitem__(self, place):
        return np.zeros(place.stop - place.start, np.float32)


@pytest.fixture
def counted(monkeypatch):
    """Files opened and parts compared, by kind."""
    counts: Counter[str] = Counter()
    compare = loading.transfers
    monkeypatch.setattr(loading, "safe_open", lambda path, framework: counts.update(opens=1) or Numbers())
    monkeypatch.setattr(loading, "transfers", lambda *parts: counts.update(compared=1) or compare(*parts))
    return counts


def test_an_index_takes_a_few_hundred_bytes_a_part_and_goes_to_the_other_ranks_as_it_is(checkpoint):
    parts = sum(len(tensor.parts) for file in checkpoint.index.files for tensor in file.tensors)
    assert parts > 9 * RANKS
    assert (checkpoint.folder / "index.json").stat().st_size < 250 * parts
    sent = pickle.dumps(checkpoint.index.files[7])
    assert pickle.loads(sent) == checkpoint.index.files[7]
    fault = BrokenCheckpoint(["a: is missing", "b: is cut off"])
    assert pickle.loads(pickle.dumps(fault)).faults == fault.faults


@pytest.mark.parametrize("rank", [5, 700])
def test_a_rank_that_continues_under_the_same_plan_opens_its_own_file_once(checkpoint, counted, rank):
    stored, own = loading.StoredNumbers(checkpoint), parts_of_rank(rank)
    wanted = [part for parts in own for part, _ in parts]
    for kind in (WEIGHT, *MOMENTS):
        for part in wanted:
            stored.fill_part(part, kind, np.zeros(part.stop - part.start, np.float32))
    assert counted["opens"] == 1
    assert counted["compared"] <= 3 * len(wanted) * 4 * TP  # of the weight's 1,024 parts, those of its rows


def test_a_rank_of_another_plan_opens_a_file_once_a_layer(checkpoint, counted):
    """A quarter of a layer, which 256 ranks wrote, in the order in which they wrote it."""
    stored = loading.StoredNumbers(checkpoint)
    for name, shape, axis in weights_of(SHAPE, 3):
        part = WeightPiece(name, shape, Slice(axis, 1, 4), 0, int(np.prod(shape)) // 4)
        stored.fill_part(part, WEIGHT, np.zeros(part.stop, np.float32))
    assert counted["opens"] <= 2 * 256


def test_what_is_saved_is_copied_once_and_stays_as_it_was(monkeypatch):
    tensor = paddle.full([2, 3], 1.0)
    copied = saving._copied("a", tensor)
    tensor.fill_(2.0)
    assert copied.read().tolist() == [1.0] * 6
    reported = []
    on_gpu = SimpleNamespace(_copy_to=lambda place, blocking: reported.extend((place, blocking)) or tensor)
    monkeypatch.setattr(device, "on_gpu", lambda: True)
    monkeypatch.setattr(device, "on_device", lambda tensor: True)
    monkeypatch.setattr(device, "finish_computing", lambda: reported.append("waited"))
    monkeypatch.setattr(paddle, "CUDAPinnedPlace", lambda: "page-locked", raising=False)
    assert device.to_host(on_gpu).tolist() == tensor.tolist() and reported == ["page-locked", False, "waited"]


def test_numbers_go_to_a_gpu_in_the_queue_of_what_is_computed(monkeypatch):
    """Not by CUDA's own queue, in which a step's first copy would wait for zero2's all-gathers."""
    asked = []
    staged = SimpleNamespace(cuda=lambda blocking: asked.append(blocking) or "on the GPU")
    monkeypatch.setattr(device, "on_gpu", lambda: True)
    monkeypatch.setattr(paddle, "CUDAPinnedPlace", lambda: "page-locked", raising=False)
    monkeypatch.setattr(paddle, "to_tensor", lambda numbers, place: asked.append(place) or staged)
    monkeypatch.setattr(device, "Mark", SimpleNamespace)
    assert device.to_device(np.zeros(3)) == "on the GPU" and asked == ["page-locked", False]
    assert [kept for kept, _ in device._staged] == [staged]
    device._staged.clear()
