import io
import json
import multiprocessing
import os
import pickle
import shutil
import time
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from paddlenlp.data import causal_dataset

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.training.data import dataset
from paddlenlp_galvatron.training.data.corpus import Corpus, write_dataset
from paddlenlp_galvatron.training.data.dataset import FOLDER, SampleIndex, build_index
from paddlenlp_galvatron.training.data.source import TrainingData

SEQ, BATCH = 16, 4


def first_batch(prefix):
    return TrainingData(prefix, SEQ, BATCH, seed=5, shares="80,15,5").batch(0)


def index_files(prefix):
    return sorted((prefix.parent / FOLDER).iterdir())


class Planted:
    """Runs a command when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=30), seq_length=st.integers(1, 12), seed=st.integers(0, 9)
)
def test_any_documents_are_cut_as_paddlenlp_cuts_them(sizes, seq_length, seed):
    """Those without a token, too."""
    tokens, documents = np.array(sizes), np.arange(len(sizes), dtype=np.int32)
    count = (sum(sizes) - 1) // seq_length
    if count < 1:
        return
    random = np.random.RandomState(seed)
    stock = causal_dataset._build_doc_idx(documents, 1, random, False)
    cuts = causal_dataset._build_sample_idx(tokens, stock, seq_length, 1, sum(sizes))
    order = causal_dataset._build_shuffle_idx(count, count, random)
    stream = np.concatenate([np.arange(tokens[:n].sum(), tokens[: n + 1].sum()) for n in stock])
    begins = [tokens[stock[:document]].sum() + offset for document, offset in cuts]
    index = SampleIndex(*build_index(tokens, 0, len(sizes), seq_length, seed))
    assert len(index) == count
    for number in range(count):
        got = [np.arange(place, place + taken) for place, taken in index.stretches(number, seq_length + 1)]
        begin = begins[order[number]]
        np.testing.assert_array_equal(np.concatenate(got), stream[begin : begin + seq_length + 1])


def _open_as_rank(prefix, rank, ready, results):
    built = []

    def build(*arguments):
        built.append(rank)
        time.sleep(0.2)  # long enough for the others to come
        return build_index(*arguments)

    dataset.build_index = build
    ready.wait()
    results.put((built, first_batch(prefix).tolist()))


def test_eight_processes_at_once_build_the_index_once_and_read_the_same(prefix):
    fork = multiprocessing.get_context("fork")
    ready, results = fork.Barrier(8), fork.Queue()
    ranks = [fork.Process(target=_open_as_rank, args=(prefix, rank, ready, results)) for rank in range(8)]
    for process in ranks:
        process.start()
    got = [results.get(timeout=600) for _ in ranks]
    for process in ranks:
        process.join()
    assert sum(len(built) for built, _ in got) == 1
    assert all(batch == got[0][1] for _, batch in got)
    assert len(index_files(prefix)) == 3


def test_nothing_of_a_data_folder_is_ever_run(prefix, tmp_path_factory):
    """Neither as PaddleNLP's index of these very data, nor as ours."""
    marker = tmp_path_factory.mktemp("outside") / "has-run"
    pickle.loads(pickle.dumps(Planted(marker)))
    assert marker.exists()  # unpickling it runs it
    marker.unlink()
    expected = first_batch(prefix)
    causal_dataset.build_train_valid_test_datasets([str(prefix)], "mmap", "80,15,5", [1, 1, 1], SEQ, 5, True)
    stock = list((prefix.parent / "index-cache").glob("*.npy"))
    assert stock
    array = io.BytesIO()
    np.save(array, np.array([Planted(marker)], object), allow_pickle=True)
    for planted in (pickle.dumps(Planted(marker)), array.getvalue()):
        description, *arrays = index_files(prefix)
        for file in [*stock, *arrays]:
            file.write_bytes(planted)
        reported = json.loads(description.read_text())
        checksums = [zlib.crc32(planted)] * len(arrays)  # as who can write there would put them
        description.write_text(json.dumps(reported | {"crc32": checksums}))
        np.testing.assert_array_equal(first_batch(prefix), expected)
        for file in index_files(prefix):
            file.write_bytes(planted)
        np.testing.assert_array_equal(first_batch(prefix), expected)
    assert not marker.exists()


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_damaged_index_is_made_again(prefix, which):
    expected = first_batch(prefix)
    file = index_files(prefix)[which]
    whole = file.read_bytes()
    for damaged in (whole[:-8], b"", whole[:100] + bytes([whole[100] ^ 1]) + whole[101:], whole + b"x"):
        file.write_bytes(damaged)
        np.testing.assert_array_equal(first_batch(prefix), expected)
        assert file.read_bytes() == whole
    file.unlink()
    os.mkfifo(file)
    np.testing.assert_array_equal(first_batch(prefix), expected)


def test_an_index_is_cut_off_under_a_run(prefix):
    data = TrainingData(prefix, SEQ, BATCH, seed=5, shares="80,15,5")
    for file in index_files(prefix):
        os.truncate(file, 10)
    with pytest.raises(UserError, match=r"step 0: .*npy: ends before byte"):
        data.batch(0)


def test_other_data_in_the_same_place_never_get_the_index_of_those_before(prefix, texts, tokenizer):
    """By means other than times and sizes: here B is older, has as many documents, and as many bytes."""
    a, b = (prefix.with_name(name) for name in "ab")
    order = list(texts)
    write_dataset(Corpus(tuple(order)), a, tokenizer, 0)
    write_dataset(Corpus(tuple(order[::-1])), b, tokenizer, 0)
    for suffix in (".bin", ".idx"):
        os.utime(b.with_name(f"b{suffix}"), ns=(10**18, 10**18))
    expected = first_batch(b)
    assert not np.array_equal(first_batch(a), expected)
    shutil.rmtree(prefix.parent / FOLDER)
    first_batch(a)
    for suffix in (".bin", ".idx"):
        shutil.copy2(b.with_name(f"b{suffix}"), a.with_name(f"a{suffix}"))
    np.testing.assert_array_equal(first_batch(a), expected)


def test_where_no_index_can_be_kept_it_stays_in_memory(prefix, monkeypatch):
    expected, folder = first_batch(prefix), prefix.parent / FOLDER
    # Others may write there.
    before = {file: file.read_bytes() for file in index_files(prefix)}
    folder.chmod(0o777)
    monkeypatch.setattr(dataset, "read_cache", lambda *_: pytest.fail("nobody knows whose index it is"))
    np.testing.assert_array_equal(first_batch(prefix), expected)
    assert {file: file.read_bytes() for file in index_files(prefix)} == before
    # It is somebody else's.
    folder.chmod(0o755)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert dataset._is_trusted(folder, os.getuid())
    assert not dataset._is_trusted(folder, 54321)
    # There is no folder, and none can be made; nor is a link followed.
    shutil.rmtree(folder)
    folder.symlink_to("/")
    np.testing.assert_array_equal(first_batch(prefix), expected)
    folder.unlink()
    folder.write_text("a file")
    np.testing.assert_array_equal(first_batch(prefix), expected)


def test_a_full_disk_keeps_nobody_from_training(prefix, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    got = first_batch(prefix)
    assert not (prefix.parent / FOLDER).exists()
    monkeypatch.undo()
    np.testing.assert_array_equal(got, first_batch(prefix))


def test_passes_go_on_beyond_the_largest_seed(prefix):
    data = TrainingData(prefix, SEQ, BATCH, seed=2**32 - 1, shares="80,15,5")
    start = TrainingData(prefix, SEQ, BATCH, seed=0, shares="80,15,5").batch(0)
    data.continue_at(0, data.samples)
    np.testing.assert_array_equal(data.batch(0), start)
