"""The cost model's accuracy against the event simulation, and its speed.

    python benchmarks/cost_model.py [--vectors 10000]

Accuracy: random stage times; error of `step_ms`, of its lower bound, and of the formula over first and last stage that
existing planners use, against the time line of every pass. Speed: prices and step times a second.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from itertools import product

from paddlenlp_galvatron.cost_model import CostModel, StageTimes, lower_bound_ms, step_ms, timeline
from paddlenlp_galvatron.plan import (
    Assumptions,
    DataParallel,
    LayerStrategy,
    ModelShape,
    Precision,
    Schedule,
    uniform_plan,
)
from paddlenlp_galvatron.profiles.analytic import analytic_computation, analytic_hardware, analytic_memory
from paddlenlp_galvatron.profiles.compute_time import ComputeTimes
from paddlenlp_galvatron.profiles.data_sheet import load_data_sheet
from paddlenlp_galvatron.profiles.memory_use import MemoryUse
from paddlenlp_galvatron.profiles.network import Network

LLAMA3_405B = ModelShape("llama3-405b", "llama", 126, 16384, 53248, 128, 8, 128256, 131072)
SEQ = 8192
NODES = 128


def random_times(rng: random.Random) -> StageTimes:
    """2 to 16 stages, even or up to four times uneven."""
    stages = rng.randint(2, 16)
    spread = rng.choice([0.1, 0.5, 3.0])
    load = [1 + spread * rng.random() for _ in range(stages)]
    return StageTimes(
        load, [2 * x for x in load], [0.3 * rng.random() for _ in load], [0.1 * rng.random() for _ in load[1:]]
    )


def first_and_last_ms(times: StageTimes, micro_batches: int) -> float:
    """The formula of existing planners: one micro-batch through all stages, the rest through the first or last."""
    once = [f + b for f, b in zip(times.forward, times.backward, strict=True)]
    last_bound = sum(once) + once[-1] * (micro_batches - 1)
    first_bound = max(min(len(once) - 1, micro_batches - 1) * once[0], sum(once[1:])) + once[0] * max(
        0, micro_batches + 1 - len(once)
    )
    return max(last_bound, first_bound) + max(times.sync)


def accuracy(vectors: int) -> None:
    rng = random.Random(0)
    errors: dict[str, list[float]] = {"simulation": [], "lower bound": [], "first and last stage": []}
    for _ in range(vectors):
        times, micro_batches = random_times(rng), rng.choice([1, 2, 4, 8, 16, 32, 64])
        schedule = rng.choice(list(Schedule))
        truth = max(span.stop_ms for span in timeline(schedule, times, micro_batches))
        errors["simulation"].append(step_ms(schedule, times, micro_batches) / truth - 1)
        errors["lower bound"].append(lower_bound_ms(schedule, times, micro_batches) / truth - 1)
        errors["first and last stage"].append(first_and_last_ms(times, micro_batches) / truth - 1)
    print(f"error against the event simulation of every pass, {vectors} random stage-time vectors")
    for name, values in errors.items():
        print(f"  {name:22} lowest {min(values):+8.2%}  median {statistics.median(values):+8.2%}  "
              f"highest {max(values):+8.2%}")  # fmt: skip


def cluster_model() -> CostModel:
    sheet = load_data_sheet("h100-80gb")
    return CostModel(
        LLAMA3_405B,
        network=Network(analytic_hardware(sheet, NODES)),
        times=ComputeTimes(analytic_computation(LLAMA3_405B, sheet, Precision.BF16, [SEQ])),
        memory=MemoryUse(analytic_memory(LLAMA3_405B, Precision.BF16, [SEQ])),
        num_nodes=NODES,
        gpus_per_node=sheet.gpus_per_node,
        assumed=Assumptions(True, Precision.BF16, True, SEQ),
    )


def speed() -> None:
    print(f"speed, {LLAMA3_405B.name} on {NODES} nodes of 8")
    model = cluster_model()
    strategies = [
        LayerStrategy(degree, ulysses, True, dp_type, recompute)
        for degree, ulysses, dp_type, recompute in product((1, 2, 4, 8, 16), (False, True), DataParallel, (False, True))
    ]
    asked = list(product(strategies, (4, 8, 16), (512, 1024)))

    def price_all() -> None:
        for strategy, pipeline, micro_batch in asked:
            model.layer_cost(
                strategy,
                stage_size=model.world_size // pipeline,
                micro_batch=micro_batch,
                micro_batches=8,
                pipeline=pipeline,
            )

    print(f"  a layer's price, new    {timed(price_all) / len(asked) * 1e6:9.1f} us")
    print(f"  a layer's price, known  {timed(price_all) / len(asked) * 1e6:9.1f} us")
    for stages, micro_batches in ((4, 16), (16, 64), (64, 256)):
        rng = random.Random(1)
        load = [1 + rng.random() for _ in range(stages)]
        times = StageTimes(load, [2 * x for x in load], load, [0.1] * (stages - 1))
        for schedule in Schedule:
            seconds = timed(lambda s=schedule, t=times, m=micro_batches: step_ms(s, t, m))  # type: ignore[misc]
            print(
                f"  step of {stages:2} stages, {micro_batches:3} micro-batches, {schedule:16} {seconds * 1e6:9.1f} us"
            )
    plan = uniform_plan(
        layers=126, world_size=1024, global_train_batch_size=2048, pp_deg=16, global_tp_deg=8, chunks=64,
        vocab_tp=8, default_dp_type="zero2", assumed=model.assumed,
    )  # fmt: skip
    print(f"  a whole plan, new       {timed(lambda: cluster_model().predict(plan)) * 1e6:9.1f} us")


def timed(work: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vectors", type=int, default=10000)
    accuracy(parser.parse_args().vectors)
    speed()


if __name__ == "__main__":
    main()
