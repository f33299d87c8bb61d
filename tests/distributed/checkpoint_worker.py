"""One rank: for each job, load a checkpoint or begin, train, save, train on; write down the losses."""

import json
import sys
from pathlib import Path

from paddlenlp_galvatron.check.parity.parity import batch_of, read_cases
from paddlenlp_galvatron.runtime.engine import Engine
from paddlenlp_galvatron.runtime.groups import Groups, run_as_rank, start_world
from paddlenlp_galvatron.runtime.paddle_private import next_rate
from paddlenlp_galvatron.runtime.setup import ModelSetup
from paddlenlp_galvatron.training.checkpoint.loading import load
from paddlenlp_galvatron.training.checkpoint.saving import Writer
from paddlenlp_galvatron.training.checkpoint.stored import open_checkpoint, verify


def main() -> None:
    folder = Path(sys.argv[1])
    groups = Groups(start_world()[0])
    jobs = json.loads(
        (folder / "jobs.json").read_text()
    )  # name, checkpoint to load or "", steps before saving and after
    for case, (name, source, before, after) in zip(read_cases(folder), jobs, strict=True):
        engine = Engine(ModelSetup.of(case.plan, case.shape, case.seq_length), groups=groups)
        optimizer = case.recipe.build(engine.tensors, engine.decaying)
        if source:
            checkpoint = open_checkpoint(Path(source), case.shape)
            verify(checkpoint)
            load(checkpoint, engine, optimizer)
        writer = Writer(folder / name, engine, keep=1)
        losses = []
        for step in range(before + after + 1):
            if step == before:
                writer.save(optimizer)
                writer.finish()
            if step < before + after:
                losses.append(engine.forward_backward(batch_of(case, engine.steps_done)))
                engine.update(optimizer, 1.0)
                next_rate(optimizer)
        engine.wait_for_updates()
        if engine.rank == 0:
            (folder / f"{name}.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    run_as_rank(main)
