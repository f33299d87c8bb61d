"""For any folder of data: one line a fault and nothing left behind, or the data as they stand there."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hostile import data
from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.training.data.dataset import HEADER
from paddlenlp_galvatron.training.data.source import TrainingData

SEQ = 4


def write(folder, files):
    for name, content in files.items():
        (folder / name).write_bytes(content)


@given(random=st.randoms(use_true_random=False))
def test_a_data_set_is_read_as_it_stands_or_refused(tmp_path_factory, random):
    folder = tmp_path_factory.mktemp("hostile")
    tokens, index = data.dataset_files(random)
    write(folder, {"x.bin": tokens, "x.idx": index})
    try:
        read = TrainingData(folder / "x", SEQ, 1, seed=3, shares="1,0,0")
        batches = [read.batch(step) for step in range(read.samples + 1)]
    except UserError as error:
        assert len(error.faults) == 1
        return
    kind = np.dtype(data.TYPES[HEADER.unpack(index[: HEADER.size])[2]])
    stored = np.frombuffer(tokens, kind).astype(np.int64).tolist()
    assert all(batch.shape == (1, SEQ + 1) and set(batch[0]) <= set(stored) for batch in batches)
