import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paddlenlp.data.indexed_dataset import MMapIndexedDataset

from paddlenlp_galvatron.plan import UserError
from paddlenlp_galvatron.training import corpus
from paddlenlp_galvatron.training.corpus import Corpus, Document, find_files, save_tokenizer, write_dataset
from paddlenlp_galvatron.training.tokenizer import end_token, load_tokenizer, train_tokenizer


@given(text=st.text(max_size=200))
def test_any_text_survives_tokenising(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_training_again_gives_the_same_tokenizer(texts, tokenizer):
    again = train_tokenizer((document.text for document in Corpus(texts)), 300)
    assert again.to_str() == tokenizer.to_str()
    assert again.get_vocab_size() == 300
    assert end_token(again) == 0


def test_tokenizer_file_is_read_back_and_never_overwritten_by_another(tmp_path, texts, tokenizer):
    save_tokenizer(tokenizer, tmp_path / "tokenizer.json")
    save_tokenizer(tokenizer, tmp_path / "tokenizer.json")
    assert load_tokenizer(tmp_path).to_str() == tokenizer.to_str()
    with pytest.raises(UserError, match="is another tokenizer"):
        save_tokenizer(train_tokenizer(["a"], 257), tmp_path / "tokenizer.json")


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "no such file"), ("{}", "not a tokenizer.json"), ("oops", "not a tokenizer.json")],
)
def test_bad_tokenizer_files_are_named(tmp_path, content, message):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match=message):
        load_tokenizer(tmp_path / "tokenizer.json")


def test_end_token_must_exist(tokenizer):
    with pytest.raises(UserError, match="has no token '<eos>'"):
        end_token(tokenizer, "<eos>")


def test_vocabulary_that_cannot_hold_bytes_is_refused():
    with pytest.raises(UserError, match="vocab_size"):
        train_tokenizer(["a"], 256)


def test_paddlenlp_reads_back_what_was_written(texts, tokenizer, prefix):
    stored = MMapIndexedDataset(str(prefix), skip_warmup=True)
    assert len(stored) == len(texts)
    for index, file in enumerate(texts):
        ids = stored[index].tolist()
        assert ids[-1] == end_token(tokenizer)
        assert tokenizer.decode(ids[:-1]) == file.read_text(encoding="utf-8")


def test_batches_do_not_change_what_is_written(tmp_path, texts, tokenizer, prefix, monkeypatch):
    monkeypatch.setattr(corpus, "BATCH_BYTES", 1)
    write_dataset(Corpus(texts), tmp_path / "again", tokenizer, end_token(tokenizer))
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"again{suffix}").read_bytes() == (tmp_path / f"text{suffix}").read_bytes()


def test_json_lines_blank_documents_and_stray_bytes(tmp_path):
    lines = tmp_path / "a.jsonl"
    lines.write_text("\n".join(json.dumps({"content": text}) for text in ("one", " ", "two")) + "\n\n")
    (tmp_path / "b.txt").write_text("\n \n")
    (tmp_path / "c.txt").write_bytes(b"caf\xe9")
    (tmp_path / "d.bin").write_bytes(b"not taken from a folder")
    read = Corpus(find_files([tmp_path, lines]), text_key="content")
    assert [document.text for document in read] == ["one", "two", "caf�"]


def test_limit_ends_after_the_document_that_passes_it(texts):
    size = texts[0].stat().st_size
    assert len(list(Corpus(texts, limit_bytes=size))) == 1
    assert len(list(Corpus(texts, limit_bytes=size + 1))) == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [("{", "line 2 is not JSON"), ("[]", 'line 2 has no text "text"'), ('{"text": 3}', 'line 2 has no text "text"')],
)
def test_bad_json_lines_are_named(tmp_path, line, message):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "fine"}\n' + line)
    with pytest.raises(UserError, match=message):
        list(Corpus((file,)))


def test_inputs_without_text_are_named(tmp_path, tokenizer):
    with pytest.raises(UserError, match="no such file or folder"):
        find_files([tmp_path / "nowhere"])
    with pytest.raises(UserError, match="holds no file"):
        find_files([tmp_path])
    with pytest.raises(UserError, match="holds no text"):
        write_dataset([], tmp_path / "x", tokenizer, 0)


def test_failure_leaves_the_old_data_and_no_new_file(prefix, tokenizer):
    before = {file: file.read_bytes() for file in prefix.parent.iterdir()}

    def breaks():
        yield Document("some text", 9)
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match="No space left"):
        write_dataset(breaks(), prefix, tokenizer, 0)
    assert {file: file.read_bytes() for file in prefix.parent.iterdir()} == before


def test_standard_library_is_real_text_in_a_fixed_order():
    files = corpus.standard_library()
    assert any(file.name == "argparse.py" for file in files)
    assert not any("site-packages" in file.parts for file in files)
    assert files == corpus.standard_library()
    assert Corpus(files).size_bytes > 4 << 20
