import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paddlenlp.data.indexed_dataset import MMapIndexedDataset
from tokenizers import Tokenizer

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.cli.main import main
from paddlenlp_galvatron.training.data import corpus
from paddlenlp_galvatron.training.data.corpus import Corpus, Document, find_files, save_tokenizer, write_dataset
from paddlenlp_galvatron.training.data.text_files import read_lines
from paddlenlp_galvatron.training.data.tokenizer import end_of_text, load_tokenizer, train_tokenizer


@given(text=st.text(max_size=200))
def test_any_text_survives_tokenising(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_training_again_gives_the_same_tokenizer(texts, tokenizer):
    again = train_tokenizer((document.text for document in Corpus(texts)), 300)
    assert again.to_str() == tokenizer.to_str()
    assert again.get_vocab_size() == 300
    assert end_of_text(again).token == 0


def test_tokenizer_file_is_read_back_and_never_overwritten_by_another(tmp_path, texts, tokenizer):
    save_tokenizer(tokenizer, tmp_path / "tokenizer.json")
    save_tokenizer(tokenizer, tmp_path / "tokenizer.json")
    assert load_tokenizer(tmp_path).to_str() == tokenizer.to_str()
    with pytest.raises(UserError, match="is another tokenizer"):
        save_tokenizer(train_tokenizer(["a"], 257), tmp_path / "tokenizer.json")


@pytest.mark.parametrize(
    ("content", "message"), [(None, "no such file"), ("{}", "not a tokenizer.json"), ("oops", "not a tokenizer.json")]
)
def test_bad_tokenizer_files_are_named(tmp_path, content, message):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match=message):
        load_tokenizer(tmp_path / "tokenizer.json")


def test_end_token_must_exist(tokenizer):
    with pytest.raises(UserError, match="has no token '<eos>'"):
        end_of_text(tokenizer, text="<eos>")


def test_vocabulary_that_cannot_hold_bytes_is_refused():
    with pytest.raises(UserError, match="vocab_size"):
        train_tokenizer(["a"], 256)


def test_paddlenlp_reads_back_what_was_written(texts, tokenizer, prefix):
    stored = MMapIndexedDataset(str(prefix), skip_warmup=True)
    assert len(stored) == len(texts)
    for index, file in enumerate(texts):
        ids = stored[index].tolist()
        assert ids[-1] == end_of_text(tokenizer).token
        assert tokenizer.decode(ids[:-1]) == file.read_text(encoding="utf-8")


def test_batches_do_not_change_what_is_written(tmp_path, texts, tokenizer, prefix, monkeypatch):
    monkeypatch.setattr(corpus, "BATCH_BYTES", 1)
    write_dataset(Corpus(texts), tmp_path / "again", tokenizer, end_of_text(tokenizer).token)
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"again{suffix}").read_bytes() == (tmp_path / f"text{suffix}").read_bytes()


def test_json_lines_and_blank_documents(tmp_path):
    lines = tmp_path / "a.jsonl"
    lines.write_text("\n".join(json.dumps({"content": text}) for text in ("one", " ", "two")) + "\n\n")
    (tmp_path / "b.txt").write_text("\n \n")
    (tmp_path / "c.txt").write_text("café")
    read = Corpus(find_files([tmp_path, lines]).files, text_key="content")
    assert [document.text for document in read] == ["one", "two", "café"]


def test_a_folder_says_what_it_leaves_out(tmp_path):
    """A folder of others would put your files into your publication."""
    own, secret = tmp_path / "own", tmp_path / "secret.txt"
    (own / "deep").mkdir(parents=True)
    secret.write_text("secret")
    (own / "a.txt").write_text("a")
    (own / "deep" / "within.txt").symlink_to(own / "a.txt")
    read = (own / "a.txt", own / "deep" / "within.txt")
    assert find_files([own]) == (read, {})
    (own / "b.txt").symlink_to(secret)
    (own / "deep" / "c.txt").symlink_to("../../secret.txt")
    os.mkfifo(own / "d.txt")
    (own / "e.txt").symlink_to("missing")
    (own / "f").symlink_to(tmp_path)
    (own / "g.pdf").write_bytes(b"%PDF-1.7 ...")
    (own / "h.csv").write_text("a,b")
    nowhere, out = "a pipe, a device, or a link to a folder or to nothing", "a link out of the folder"
    left_out = {
        own / "b.txt": out, own / "d.txt": nowhere, own / "deep" / "c.txt": out, own / "e.txt": nowhere,
        own / "f": nowhere, own / "g.pdf": "it is a PDF; convert it to text",
        own / "h.csv": "neither JSON lines nor named .txt, .md, .rst, .py",
    }  # fmt: skip
    assert find_files([own]) == (read, left_out)
    (tmp_path / "alias").symlink_to(own)
    assert len(find_files([tmp_path / "alias"]).files) == 2
    assert find_files([own / "b.txt"]) == ((own / "b.txt",), {})  # a file that is named is meant


def test_the_summary_names_what_is_left_out(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text('{"text": "some text"}\n')
    for number in range(25):
        (tmp_path / "in" / f"b{number:02}.pdf").write_bytes(b"%PDF-1.7")
    words = ["data", "prepare", str(tmp_path / "in"), "--vocab_size", "300", "--output", str(tmp_path / "out")]
    assert main(words) == 0
    stated = capsys.readouterr().out.splitlines()
    assert f"skipped: {tmp_path / 'in' / 'b00.pdf'}: it is a PDF; convert it to text" in stated and len(stated) == 22
    assert stated[-1] == "skipped: 5 more; --json names them all"
    assert main([*words, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["left_out"]) == 25


def test_limit_ends_after_the_document_that_passes_it(texts):
    size = texts[0].stat().st_size
    assert len(list(Corpus(texts, limit_bytes=size))) == 1
    assert len(list(Corpus(texts, limit_bytes=size + 1))) == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "line 2 is not one JSON object"),
        (b"[]", 'line 2 has no text "text"'),
        (b'{"text": 3}', 'line 2 has no text "text"'),
        (b'{"text": "\\ud800"}', r"line 2 is not one JSON object: .*\\ud800 is one half of a character"),
        (b'{"text": "\xe9"}', "line 2: character 11 is not UTF-8 text; .* --encoding gbk"),
        (b'{"text": "a", "more": ' + b"[" * 100_000, "line 2 is not one JSON object: .* within one another"),
        (b'{"text": "a", "more": ' + b"[" * 100 + b"]" * 100 + b"}", "line 2 is not one JSON object: .* within one"),
        (b'{"text": "a", "text": "b"}', "line 2 is not one JSON object: .*stands twice"),
        (b'{"text": "a", "more": NaN}', "line 2 is not one JSON object: .*NaN"),
        (b'{"text": "' + b"a" * 3000 + b'"}', "a.jsonl: line 2: has more than 2,000 characters"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_json_lines_are_named(tmp_path, monkeypatch, line, message):
    if b"aaa" in line:
        monkeypatch.setattr(read_lines, "__defaults__", (None, 2000))
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"text": "fine"}\n' + line)
    with pytest.raises(UserError, match=message):
        list(Corpus((file,)))


def test_inputs_without_text_are_named(tmp_path, tokenizer, monkeypatch):
    with pytest.raises(UserError, match="no such file or folder"):
        find_files([tmp_path / "nowhere"])
    with pytest.raises(UserError, match="holds no file"):
        find_files([tmp_path])
    with pytest.raises(UserError, match="holds no text"):
        write_dataset([], tmp_path / "x", tokenizer, 0)
    (tmp_path / "long.txt").write_text("x" * 101)
    monkeypatch.setattr(corpus, "LARGEST_TEXT", 100)
    with pytest.raises(UserError, match=r"long\.txt: has more than 100 characters"):
        list(Corpus((tmp_path / "long.txt",)))


def test_failure_leaves_the_old_data_and_no_new_file(prefix, tokenizer):
    before = {file: file.read_bytes() for file in prefix.parent.iterdir()}

    def breaks():
        yield Document("some text", 9, "a.txt")
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match="No space left"):
        write_dataset(breaks(), prefix, tokenizer, 0)
    assert {file: file.read_bytes() for file in prefix.parent.iterdir()} == before


def with_vocabulary(tokenizer, **ids):
    """The tokenizer with other ids for some tokens."""
    description = json.loads(tokenizer.to_str())
    description["model"]["vocab"] |= ids
    return Tokenizer.from_str(json.dumps(description))


def test_ids_are_stored_as_they_are_or_refused(tmp_path, texts, tokenizer):
    """Few tokens may have large ids; a type chosen by their number would let those wrap."""
    used = tokenizer.encode(texts[0].read_text()).tokens[0]
    wide = with_vocabulary(tokenizer, **{used: 70_000})
    write_dataset(Corpus(texts), tmp_path / "wide", wide, 0)
    stored = MMapIndexedDataset(str(tmp_path / "wide"), skip_warmup=True)
    assert [stored[n].tolist()[:-1] for n in range(40)] == [wide.encode(file.read_text()).ids for file in texts]
    assert max(stored[n].max() for n in range(40)) == 70_000
    with pytest.raises(UserError, match="beyond 2,147,483,647"):
        write_dataset(Corpus(texts), tmp_path / "wider", with_vocabulary(tokenizer, **{used: 2**32 - 1}), 0)
    assert not list(tmp_path.glob("wider*"))


def test_an_id_that_no_vocabulary_has_is_refused_with_its_line(tmp_path, tokenizer, monkeypatch):
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("one", "two", "three")))
    monkeypatch.setattr(corpus, "encode_limited", lambda _, texts: [[1], [70_000], [2]])
    with pytest.raises(UserError, match=r"makes token 70000 of .*a\.jsonl: line 2, which"):
        write_dataset(Corpus((file,)), tmp_path / "out", tokenizer, 0)
    assert sorted(tmp_path.iterdir()) == [file]


def test_tokenizers_neither_cut_documents_nor_fill_them_up(tmp_path, texts, tokenizer, prefix):
    """As files of models that were used for something else may ask for."""
    asks = Tokenizer.from_str(tokenizer.to_str())
    asks.enable_truncation(5)
    asks.enable_padding(length=500, pad_id=7)
    asks.save(str(tmp_path / "tokenizer.json"))
    write_dataset(Corpus(texts), tmp_path / "asked", load_tokenizer(tmp_path), 0)
    assert (tmp_path / "asked.bin").read_bytes() == prefix.with_name("text.bin").read_bytes()


def test_a_tokenizer_that_fails_is_named(tmp_path, texts, tokenizer):
    description = json.loads(tokenizer.to_str())
    description["model"] = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "none"}
    with pytest.raises(UserError, match=r"tokenizer: cannot turn the text into tokens: .*; is tokenizer.json whole"):
        write_dataset(Corpus(texts), tmp_path / "out", Tokenizer.from_str(json.dumps(description)), 0)
    assert not list(tmp_path.iterdir())


def test_two_at_once_never_mix_their_files(tmp_path, texts, tokenizer):
    def slowly():
        yield from Corpus(texts[:1])
        with pytest.raises(UserError, match="is in use by process"):
            write_dataset(Corpus(texts), tmp_path / "x", tokenizer, 0, tmp_path / "tokenizer.json")

    assert write_dataset(slowly(), tmp_path / "x", tokenizer, 0, tmp_path / "tokenizer.json").documents == 1
    assert {file.name for file in tmp_path.iterdir()} == {"x.bin", "x.idx", "tokenizer.json"}


def test_standard_library_is_real_text_in_a_fixed_order():
    files = corpus.standard_library()
    assert any(file.name == "argparse.py" for file in files)
    assert not any("site-packages" in file.parts for file in files)
    assert files == corpus.standard_library()
    assert Corpus(files).size_bytes > 4 << 20
