from paddlenlp_galvatron.cli.main import main
from paddlenlp_galvatron.training.data import TrainingData


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
        ([], "input: name files or folders"),
        ([file, "--standard_library"], "input: name files or folders"),
        ([str(tmp_path / "none.txt")], "no such file or folder"),
        ([file, "--vocab_size", "10"], "vocab_size"),
        ([file, "--end_token", "<eos>", "--vocab_size", "300"], "no token '<eos>'"),
        ([file, "--tokenizer", str(tmp_path)], "no such file"),
    ]:
        assert main(["data", "prepare", *arguments, "--output", output]) == 2
        assert message in capsys.readouterr().err
        assert not list(tmp_path.iterdir())
