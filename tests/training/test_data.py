import gzip
import os
import shutil
import struct
from dataclasses import replace

import numpy as np
import pytest
from distributed.plans import plan
from hypothesis import given
from hypothesis import strategies as st
from paddlenlp.data import causal_dataset
from paddlenlp.data.blendable_dataset import BlendableDataset
from paddlenlp.data.indexed_dataset import MMapIndexedDatasetBuilder

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.plan import ModelShape
from paddlenlp_galvatron.training.data import source as data_module
from paddlenlp_galvatron.training.data.corpus import Corpus, write_dataset
from paddlenlp_galvatron.training.data.dataset import HEADER, split_edges
from paddlenlp_galvatron.training.data.source import RandomData, TrainingData
from paddlenlp_galvatron.training.data.tokenizer import END_OF_TEXT
from paddlenlp_galvatron.training.inputs import open_data as open_run
from paddlenlp_galvatron.training.settings import TrainSettings

SEQ, BATCH = 16, 4
SPLITS = "80,15,5"


def open_data(prefix, **options):
    return TrainingData(prefix, SEQ, BATCH, **{"seed": 5, "shares": SPLITS, **options})


def stock_samples(prefix, seed, split=0):
    """All samples of one pass, by PaddleNLP's own entry point."""
    datasets = causal_dataset.build_train_valid_test_datasets([str(prefix)], "mmap", SPLITS, [1, 1, 1], SEQ, seed, True)
    return [sample["text"] for sample in (datasets[split][n] for n in range(len(datasets[split])))]


@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_samples_are_those_of_paddlenlp_pass_after_pass(prefix, split):
    data = open_data(prefix, split=split)
    which = ["train", "valid", "test"].index(split)
    expected = [sample for number in range(3) for sample in stock_samples(prefix, 5 + number, which)]
    steps = len(expected) // BATCH
    got = np.concatenate([data.batch(step) for step in range(steps)])
    assert data.samples * 3 == len(expected)
    np.testing.assert_array_equal(got, expected[: steps * BATCH])
    assert got.dtype == np.int64 and got.shape[1] == SEQ + 1


def test_a_step_is_the_same_whenever_it_is_asked_for(prefix):
    data = open_data(prefix)
    last = data.samples // BATCH + 2  # in the second pass
    batches = [data.batch(step) for step in range(last + 1)]
    for step in (last, 0, last // 2):
        np.testing.assert_array_equal(open_data(prefix).batch(step), batches[step])
    assert not np.array_equal(batches[0], open_data(prefix, seed=6).batch(0))


def test_a_pass_holds_every_token_of_the_split_once(prefix, tokenizer):
    """Samples overlap by one token; put back in their order they are the shuffled documents, whole."""
    data = open_data(prefix, shares="1,0,0")
    steps = data.samples // BATCH
    tokens = np.concatenate([data.batch(step)[:, :-1].ravel() for step in range(steps)])
    stored = np.fromfile(f"{prefix}.bin", dtype=np.uint16)
    lost = len(stored) - len(tokens)
    assert 0 < lost <= (BATCH + 1) * SEQ
    assert (np.bincount(tokens, minlength=300) <= np.bincount(stored, minlength=300)).all()
    assert tokenizer.token_to_id(END_OF_TEXT) in tokens


@pytest.fixture
def three(tmp_path, texts, tokenizer):
    """A folder of three data sets of unlike sizes."""
    folder = tmp_path / "three"
    for name, some in (("a", texts[:22]), ("b", texts[22:34]), ("c", texts[34:])):
        write_dataset(Corpus(some), folder / name, tokenizer, 0)
    return folder


@pytest.mark.parametrize("split", ["train", "valid"])
def test_a_blend_is_paddlenlps_own(three, split):
    """PaddleNLP makes 20 samples more of each data set than it needs; within one pass over each ours are the same."""
    words = ["0.6", str(three / "a"), "0.3", str(three / "b"), "0.2", str(three / "c")]
    which, shares, seq, wanted = ["train", "valid"].index(split), "60,40,0", 4, 100
    stock = causal_dataset.build_train_valid_test_datasets(words, "mmap", shares, [wanted] * 3, seq, 5, True)[which]
    data = TrainingData(" ".join(words), seq, BATCH, 5, split, shares)
    assert all(one.samples >= wanted * weight + 20 for one, weight in zip(data._sets, (0.55, 0.28, 0.19), strict=True))
    got = np.concatenate([data.batch(step) for step in range(wanted // BATCH)])
    np.testing.assert_array_equal(got, [stock[n]["text"] for n in range(wanted)])


class Numbers:
    """A data set whose samples are their numbers."""

    desc = "numbers"

    def __getitem__(self, number):
        return {"number": number}


@pytest.mark.parametrize("weights", [[1, 1], [0.7, 0.3], [3, 2, 0.001], [0.1, 0.2, 0.3, 0.4, 0.5]])
def test_long_blends_keep_paddlenlps_order(three, monkeypatch, weights):
    monkeypatch.setattr(data_module, "FIRST_BLOCK", 4)
    count = 5000
    stock = BlendableDataset([Numbers()] * len(weights), [weight / sum(weights) for weight in weights], count, False)
    data = TrainingData(" ".join(f"{weight} {three / 'a'}" for weight in weights), SEQ, count, 5, shares=SPLITS)
    for which, one in enumerate(data._sets):
        monkeypatch.setattr(one, "sample", lambda number, which=which: np.array([which, number]))
    expected = [[sample["dataset_idx"], sample["number"]] for sample in (stock[n] for n in range(count))]
    np.testing.assert_array_equal(data.batch(0), expected)


def test_a_blend_continues_pass_after_pass_and_at_any_sample(three):
    blend = f"0.9 {three / 'c'} 0.1 {three / 'a'}"
    data = TrainingData(blend, SEQ, BATCH, 5, shares=SPLITS)
    steps = 3 * data._sets[0].samples // BATCH
    batches = [data.batch(step) for step in range(steps)]
    expected = [sample.tolist() for number in (5, 6) for sample in stock_samples(three / "c", number)]
    samples = iter(np.concatenate(batches).tolist())
    assert all(sample in samples for sample in expected)  # in this order, others between
    for step in (steps - 1, 1, steps // 2):
        np.testing.assert_array_equal(TrainingData(blend, SEQ, BATCH, 5, shares=SPLITS).batch(step), batches[step])
    # With batches of another size it continues at the sample that comes next.
    larger = TrainingData(blend, SEQ, 2 * BATCH, 5, shares=SPLITS)
    larger.continue_at(3, data.first_sample(3))
    np.testing.assert_array_equal(larger.batch(3), np.concatenate(batches[3:5]))
    np.testing.assert_array_equal(larger.batch(4), np.concatenate(batches[5:7]))


def test_a_folder_blends_its_data_sets_equally(three):
    equal = " ".join(f"1 {three / name}" for name in "abc")
    for step in (0, 7):
        batches = [TrainingData(data, SEQ, BATCH, 5, shares=SPLITS).batch(step) for data in (three, equal)]
        np.testing.assert_array_equal(*batches)


def test_every_plan_gets_the_same_global_batch(three):
    shape = ModelShape("tiny", "llama", 2, 16, 32, heads=4, kv_heads=4, vocab_size=300, max_position_embeddings=SEQ)
    settings = TrainSettings(plan="p", model="m", input_dir=str(three), split=SPLITS, world_size=8)
    plans = [plan(8, "1 1", micro_batches=1), plan(8, "8 2", vocab="2"), plan(8, "1 4", (1, 1), vocab="2")]
    sized = [replace(one, assumed=replace(one.assumed, seq_length=SEQ)) for one in plans]
    batches = [open_run(settings, one, shape).batch(2) for one in sized]
    assert all((batch == batches[0]).all() for batch in batches)


def test_nothing_is_printed(prefix, capfd):
    open_data(prefix)
    assert capfd.readouterr() == ("", "")


def test_faults_of_the_data_are_named(prefix, tmp_path_factory):
    with pytest.raises(UserError, match="no such file"):
        open_data(prefix.with_name("other"))
    with pytest.raises(UserError, match="less than one sample"):
        TrainingData(prefix, 100_000, BATCH)
    for shares in ("a,b", "1,2/3", "-1,2,0", "0,0", "nan,1", "1,1,1,1"):
        with pytest.raises(UserError, match="is not three shares"):
            open_data(prefix, shares=shares)
    with pytest.raises(UserError, match=r'split: "100,0,0" leaves the valid split no documents'):
        open_data(prefix, shares="100,0,0", split="valid")
    for blend in ("0.5 a 0.5", "a 0.5", "0 a 1 b", "a b", "nan a 1 b"):
        with pytest.raises(UserError, match="is no weight above 0 before each data set"):
            open_data(blend)
    with pytest.raises(UserError, match="the folder holds no data set"):
        open_data(tmp_path_factory.mktemp("empty"))
    with pytest.raises(UserError, match="vocab_size is 100"):
        open_data(prefix, vocab_size=100).batch(0)


def test_faults_of_the_files_are_named(prefix):
    bin_file, idx_file = prefix.with_name("text.bin"), prefix.with_name("text.idx")
    tokens, index = bin_file.read_bytes(), idx_file.read_bytes()
    documents = HEADER.unpack(index[: HEADER.size])[3]
    sizes, places, entries = HEADER.size, HEADER.size + 4 * documents, HEADER.size + 12 * documents

    def changed(at, form, value):
        return index[:at] + struct.pack(form, value) + index[at + struct.calcsize(form) :]

    bin_file.write_bytes(tokens[:-2])
    with pytest.raises(UserError, match="cut off"):
        open_data(prefix)
    bin_file.write_bytes(tokens)
    for damaged, message in [
        (index[:-1], "not a Megatron index"),
        (b"MMIDIDX", "not a Megatron index"),
        (b"x" * 1000, "not a Megatron index"),
        (changed(17, "<B", 7), "its tokens are no whole numbers"),
        (changed(9, "<Q", 2), "of version 2, not 1"),
        (index + bytes(documents), "the index of multimodal data, which are not supported"),
        (b"TNTIDX\0\0" + index, r"it is the lazy index of a Megatron data set \(TNTIDX\)"),
        (gzip.compress(index, mtime=0), r"it is compressed \(gzip\)"),
        (changed(18, "<Q", 2**62), "not a Megatron index"),  # whose 12 bytes each make 0 modulo 2^64
        (changed(sizes, "<i", -7), "document 0 has less than 0 tokens"),
        (changed(sizes + 4, "<i", 2**31 - 1), "cut off"),
        (changed(places + 8, "<q", -8), "document 1 does not begin where the one before ends"),
        (changed(places + 8 * 5, "<q", 2**60), "document 5 does not begin where the one before ends"),
        (changed(entries + 8, "<q", -1), "list of documents"),
        (changed(len(index) - 8, "<q", 2**40), "list of documents"),
    ]:
        idx_file.write_bytes(damaged)
        with pytest.raises(UserError, match=message):
            open_data(prefix)
    assert sorted(prefix.parent.iterdir()) == [bin_file, idx_file]  # no folder for an index that cannot be


def test_tokens_below_0_are_refused(tmp_path):
    builder = MMapIndexedDatasetBuilder(str(tmp_path / "a.bin"), np.int32)
    builder.add_item([1, -5] * SEQ)
    builder.end_document()
    builder.finalize(str(tmp_path / "a.idx"))
    with pytest.raises(UserError, match=r"step 0: .*a: holds token -5"):
        TrainingData(tmp_path / "a", SEQ, 1, shares="1,0,0").batch(0)


def test_data_that_change_under_a_run_are_an_error_that_names_them(prefix):
    """A mapped file that is cut off ends a process by SIGBUS."""
    tokens = prefix.with_name("text.bin")
    content = tokens.read_bytes()

    def write(changed):
        with tokens.open("r+b") as file:  # the same file, as `cp` and shells write it
            file.truncate(0)
            file.write(changed)

    data = open_data(prefix)
    expected = data.batch(1)
    os.utime(tokens, ns=(1, 1))
    np.testing.assert_array_equal(data.batch(1), expected)
    for changed in (content[: len(content) // 2], b"", content[::-1]):
        write(changed)
        with pytest.raises(UserError, match=rf"^step 1: {tokens}: (ends before byte|has changed)"):
            for _ in range(2):
                data.batch(1)
    write(content)
    np.testing.assert_array_equal(data.batch(1), expected)
    tokens.rename(tokens.with_name("moved"))
    np.testing.assert_array_equal(data.batch(1), expected)  # its opened files stay
    with pytest.raises(UserError, match=r"text\.bin: no such file"):
        open_data(prefix)


def test_the_identity_of_data_is_their_content(prefix, tmp_path_factory):
    """A checkpoint continues with the same data in another folder, and never with others in the same."""
    before = open_data(prefix).identity
    copy = tmp_path_factory.mktemp("copy") / "other"
    for suffix in (".bin", ".idx"):
        shutil.copy(prefix.with_name(f"text{suffix}"), copy.with_name(f"other{suffix}"))
    assert open_data(copy).identity == before
    for suffix, at, byte in ((".bin", 0, b"\x07"), (".idx", -8, bytes([39]))):  # of equal size, as many documents
        file = copy.with_name(f"other{suffix}")
        content = bytearray(file.read_bytes())
        content[at : at + 1 or None] = byte
        file.write_bytes(content)
        assert open_data(copy).identity != before
        shutil.copy(prefix.with_name(f"text{suffix}"), file)


def test_random_data_depends_on_its_arguments_alone():
    data = RandomData(vocab_size=100, seq_length=SEQ, global_batch=BATCH, seed=1)
    batch = data.batch(3)
    assert batch.shape == (BATCH, SEQ + 1) and batch.dtype == np.int64
    assert batch.min() >= 0 and batch.max() < 100
    np.testing.assert_array_equal(batch, RandomData(100, SEQ, BATCH, seed=1).batch(3))
    assert not np.array_equal(batch, data.batch(4))
    assert not np.array_equal(batch, RandomData(100, SEQ, BATCH, seed=2).batch(3))


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=3).filter(sum), st.sampled_from(",/"), st.integers(0, 10**6))
def test_splits_are_paddlenlps(shares, mark, documents):
    text = mark.join(map(str, shares))
    theirs = causal_dataset.get_train_valid_test_split_(text, documents)
    assert split_edges(text, documents) == [max(0, edge) for edge in theirs]
