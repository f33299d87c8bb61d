"""What rank 0 says of checkpoints comes to the terminal, a whole line at a time."""

from paddlenlp_galvatron.cli.training_run import RankNews


def test_lines_of_checkpoints_are_told_once(tmp_path):
    log = tmp_path / "workerlog.0"
    told = RankNews(log)
    assert told.read() == []
    log.write_text("[INFO] of others\nresuming from step 3\nsaved output/checkpoints/step-000")
    assert told.read() == ["resuming from step 3"]
    with log.open("a") as file:
        file.write("00006\nwriting x: 5% of 3 MiB of rank 0\n")
    assert told.read() == ["saved output/checkpoints/step-00000006", "writing x: 5% of 3 MiB of rank 0"]
    assert told.read() == []
