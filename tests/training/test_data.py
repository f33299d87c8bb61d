import multiprocessing
import os
from dataclasses import replace

import numpy as np
import pytest
from distributed.plans import plan
from paddlenlp.data import causal_dataset
from paddlenlp.data.blendable_dataset import BlendableDataset

from paddlenlp_galvatron.plan import ModelShape, UserError
from paddlenlp_galvatron.training import data as data_module
from paddlenlp_galvatron.training.corpus import Corpus, write_dataset
from paddlenlp_galvatron.training.data import RandomData, TrainingData
from paddlenlp_galvatron.training.settings import TrainSettings
from paddlenlp_galvatron.training.tokenizer import END_OF_TEXT

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


def test_a_blend_goes_on_pass_after_pass_and_at_any_sample(three):
    blend = f"0.9 {three / 'c'} 0.1 {three / 'a'}"
    data = TrainingData(blend, SEQ, BATCH, 5, shares=SPLITS)
    steps = 3 * data._sets[0].samples // BATCH
    batches = [data.batch(step) for step in range(steps)]
    expected = [sample.tolist() for number in (5, 6) for sample in stock_samples(three / "c", number)]
    samples = iter(np.concatenate(batches).tolist())
    assert all(sample in samples for sample in expected)  # in this order, others between
    for step in (steps - 1, 1, steps // 2):
        np.testing.assert_array_equal(TrainingData(blend, SEQ, BATCH, 5, shares=SPLITS).batch(step), batches[step])
    # With batches of another size it goes on at the sample that comes next.
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
    batches = [data_module.open_data(settings, one, shape).batch(2) for one in sized]
    assert all((batch == batches[0]).all() for batch in batches)


def _open_as_rank(prefix, rank, ready, results):
    os.environ.update(PADDLE_TRAINER_ID=str(rank), PADDLE_TRAINERS_NUM="8", PADDLE_RANK_IN_NODE=str(rank))
    causal_dataset.local_rank = rank  # as it is when PaddleNLP is imported under the launcher
    built = []
    build = causal_dataset._build_doc_idx
    causal_dataset._build_doc_idx = lambda *args: built.append(rank) or build(*args)
    ready.wait()
    results.put((built, open_data(prefix).batch(1).tolist()))


def test_eight_processes_at_once_build_the_index_once_and_read_the_same(prefix):
    fork = multiprocessing.get_context("fork")
    ready, results = fork.Barrier(8), fork.Queue()
    ranks = [fork.Process(target=_open_as_rank, args=(prefix, rank, ready, results)) for rank in range(8)]
    for process in ranks:
        process.start()
    got = [results.get(timeout=60) for _ in ranks]
    for process in ranks:
        process.join()
    assert sum(len(built) for built, _ in got) == 1
    assert all(batch == got[0][1] for _, batch in got)


def test_cut_off_index_files_are_built_again(prefix):
    expected = open_data(prefix).batch(0)
    (shuffle,) = prefix.parent.glob("index-cache/*_shuffle_idx.npy")
    shuffle.write_bytes(shuffle.read_bytes()[:-8])
    np.testing.assert_array_equal(open_data(prefix).batch(0), expected)


def test_new_data_in_the_same_place_gets_a_new_index(prefix, texts, tokenizer):
    before = open_data(prefix).samples
    write_dataset(Corpus(texts[:20]), prefix, tokenizer, 0)
    assert open_data(prefix).samples < before


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
    tokens = prefix.with_name("text.bin")
    tokens.write_bytes(tokens.read_bytes()[:-2])
    with pytest.raises(UserError, match="cut off"):
        open_data(prefix)
    index = prefix.with_name("text.idx")
    for damaged in (index.read_bytes()[:-1], b"MMIDIDX", b"x" * 1000):
        index.write_bytes(damaged)
        with pytest.raises(UserError, match="not a Megatron index"):
            open_data(prefix)


def test_random_data_depends_on_its_arguments_alone():
    data = RandomData(vocab_size=100, seq_length=SEQ, global_batch=BATCH, seed=1)
    batch = data.batch(3)
    assert batch.shape == (BATCH, SEQ + 1) and batch.dtype == np.int64
    assert batch.min() >= 0 and batch.max() < 100
    np.testing.assert_array_equal(batch, RandomData(100, SEQ, BATCH, seed=1).batch(3))
    assert not np.array_equal(batch, data.batch(4))
    assert not np.array_equal(batch, RandomData(100, SEQ, BATCH, seed=2).batch(3))
