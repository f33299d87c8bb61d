from pathlib import Path

import pytest

from paddlenlp_galvatron.training.data.corpus import Corpus, write_dataset
from paddlenlp_galvatron.training.data.tokenizer import end_of_text, train_tokenizer

TEXT = "the cat sat on a mat and saw how 7 dogs ran by the blue sea, où l'été dure\n"
WORDS = TEXT.split(" ")


@pytest.fixture(scope="session")
def texts(tmp_path_factory) -> tuple[Path, ...]:
    """Forty small documents, all different."""
    folder = tmp_path_factory.mktemp("texts")
    for number in range(40):
        words = (WORDS[(number * 7 + k * k) % len(WORDS)] for k in range(60 + number))
        (folder / f"{number:02}.txt").write_text(" ".join(words), encoding="utf-8")
    return tuple(sorted(folder.iterdir()))


@pytest.fixture(scope="session")
def tokenizer(texts):
    return train_tokenizer((document.text for document in Corpus(texts)), 300)


@pytest.fixture
def prefix(tmp_path, texts, tokenizer) -> Path:
    """A data set of the texts."""
    write_dataset(Corpus(texts), tmp_path / "text", tokenizer, end_of_text(tokenizer).token)
    return tmp_path / "text"


@pytest.fixture(scope="module")
def unlimited():
    """No process is started to read a tokenizer.json: those of tests are small and our own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paddlenlp_galvatron.training.data.tokenizer.limited", lambda work, *_: work())
        yield
