import json
import os
import signal
import threading
from pathlib import Path

import pytest

from paddlenlp_galvatron.base import process
from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.base.process import limited
from paddlenlp_galvatron.cli.main import main
from paddlenlp_galvatron.training.data.source import TrainingData


def replacing(pattern: str, content: str) -> dict[str, object]:
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


def test_text_to_batches(tmp_path, texts, capsys):
    output = tmp_path / "out" / "text"
    folder = str(texts[0].parent)
    assert main(["data", "prepare", "--input", folder, "--vocab-size", "300", "--output", str(output)]) == 0
    assert "40 documents" in capsys.readouterr().out
    again = tmp_path / "again"
    tokenizer = str(output.parent)  # the folder, as that of a Hugging Face model
    files = [str(file) for file in texts]
    assert main(["data", "prepare", *files, "--tokenizer", tokenizer, "--output", str(again)]) == 0
    first, second = TrainingData(output, 16, 4).batch(0), TrainingData(again, 16, 4).batch(0)
    assert (first == second).all() and first.max() < 300


def test_mistakes_end_with_exit_code_2_and_leave_nothing(tmp_path, texts, capsys):
    file, output = str(texts[0]), str(tmp_path / "out" / "x")
    for arguments, message in [
        ([], "input: missing; name files or folders"),
        ([file, "--standard_library"], "input: missing; name files or folders"),
        ([str(tmp_path / "none.txt")], "no such file or folder"),
        ([str(tmp_path / ("n" * 300))], "cannot be read: File name too long"),
        ([file, "--vocab_size", "10"], "vocab_size"),
        ([file, "--vocab_size", "1000001"], "must be at most 1000000"),
        ([file, "--end_token", "<eos>", "--vocab_size", "300"], "no token '<eos>'"),
        ([file, "--tokenizer", str(tmp_path)], "no such file"),
        ([file, "--output", "/"], "/: is a folder; give the path of a data set"),
        ([file, "--output", f"{tmp_path}/out/{'n' * 300}", "--vocab_size", "300"], "File name too long"),
        ([file, "--output", f"{file}/x", "--vocab_size", "300"], "cannot be written"),
        ([file, "--output", "/proc/x/y", "--vocab_size", "300"], "/proc/x/y: cannot be written: No such file"),
    ]:
        given = arguments if "--output" in arguments else [*arguments, "--output", output]
        assert main(["data", "prepare", *given]) == 2
        faults = capsys.readouterr().err
        assert message in faults
        assert faults.startswith("error: ") and faults.count("\n") == 1
        assert not list(tmp_path.iterdir())


def test_a_failed_prepare_is_no_obstacle_to_the_next(tmp_path, texts, capsys):
    """The tokenizer of text that could not be written would refuse any other text."""
    bad, output = tmp_path / "bad.jsonl", tmp_path / "out" / "x"
    bad.write_text('{"text": "fine"}\n{"text": "\\ud800"}\n')
    own = ["--vocab_size", "300", "--output", str(output)]
    assert main(["data", "prepare", str(bad), *own]) == 2
    assert sorted(tmp_path.iterdir()) == [bad]
    for file in ("x.bin", "x.idx", "tokenizer.json"):  # the last step fails, too
        (output.parent / file).mkdir(parents=True)
        assert main(["data", "prepare", str(texts[0]), *own]) == 2
        assert list(output.parent.iterdir()) == [output.parent / file]
        (output.parent / file).rmdir()
    assert main(["data", "prepare", str(texts[0]), *own]) == 0
    assert main(["data", "prepare", str(texts[1]), *own]) == 2
    assert "is another tokenizer" in capsys.readouterr().err


GROWS = [
    {"normalizer": {"type": "Sequence", "normalizers": [replacing("l", 50 * "l")] * 6}},
    {"normalizer": {"type": "Sequence", "normalizers": [replacing("l", "ll")] * 24}},
]


@pytest.mark.parametrize("bomb", GROWS, ids=["memory", "doubling"])
def test_a_tokenizer_that_grows_without_bound_is_a_line(tmp_path, tokenizer, texts, capsys, monkeypatch, bomb):
    """A few hundred bytes of it would take the machine's memory."""
    monkeypatch.setattr(process, "LEAST_MIB", 200)
    (tmp_path / "tokenizer.json").write_text(json.dumps(json.loads(tokenizer.to_str()) | bomb))
    words = ["data", "prepare", str(texts[0]), "--tokenizer", str(tmp_path), "--output", str(tmp_path / "out" / "x")]
    assert main([*words, "--end_token", "<|endoftext|>"]) == 2
    stated = capsys.readouterr().err
    assert "MiB of memory" in stated and stated.startswith("error: tokenizer: turning ") and stated.count("\n") == 1, (
        stated
    )
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]


def test_what_does_not_end_is_ended_and_ctrl_c_is_taken_meanwhile(monkeypatch):
    def endless() -> bytes:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # as a library that Python waits for
        while True:
            pass

    def children() -> str:
        return Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text()

    before = children()
    monkeypatch.setattr(process, "LEAST_S", 1)
    with pytest.raises(UserError, match="it takes more than 1 s"):
        limited(endless, "it", 0)
    monkeypatch.undo()
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        limited(endless, "it", 10**7)
    assert children() == before
