"""The analytic path beside published runs of Megatron-LM on A100: step times from shapes and a data sheet alone.

    python benchmarks/published.py [--json]

Rows: Narayanan et al. 2021 (arXiv:2104.04473), tables 1 and 2, and Korthikanti et al. 2022 (arXiv:2205.05198), table 5.
Nothing is fitted to them. GPT's layers stand as the shape of ours with equal weights and operations, a gated MLP of
8/3 of the width for a plain one of 4, and write what the second paper counts for them. Micro-batches and chunks of the
first paper's table 1 are those of its authors' script (NVIDIA/Megatron-LM, examples/sc21/run_table_1.sh); chunks of its
table 2 are not told and taken as one a stage.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from paddlenlp_galvatron.cost_model import CostModel
from paddlenlp_galvatron.model import Fused, Recompute
from paddlenlp_galvatron.plan import Assumptions, ModelShape, Precision, uniform_plan
from paddlenlp_galvatron.plan.uniform import even_stages
from paddlenlp_galvatron.profiles.analytic import analytic_computation, analytic_hardware, analytic_memory
from paddlenlp_galvatron.profiles.compute_time import ComputeTimes
from paddlenlp_galvatron.profiles.data_sheet import load_data_sheet
from paddlenlp_galvatron.profiles.memory_use import MemoryUse
from paddlenlp_galvatron.profiles.network import Network

SEQ, VOCAB = 2048, 51200
SHEET = load_data_sheet("a100-80gb")


@dataclass(frozen=True)
class Run:
    """A published run."""

    source: str
    billions: float
    hidden: int
    layers: int
    heads: int
    tp: int
    pp: int
    gpus: int
    batch: int
    micro_batch: int  # samples of one data-parallel rank
    step_s: float | None = None
    tflops: float | None = None  # achieved, of one GPU, recompute counted
    interleaved: int = 1  # model chunks of a stage
    selective: bool = False  # attention alone is recomputed, with Megatron-SP; else every layer, without

    @property
    def published_s(self) -> float:
        return self.step_s or self.flops / (self.gpus * (self.tflops or 0) * 1e12)

    @property
    def flops(self) -> float:
        """Of a step with recompute: Narayanan et al., equation 3."""
        h = self.hidden
        share = 1 + SEQ / (6 * h) + VOCAB / (16 * self.layers * h)
        return 96 * self.batch * SEQ * self.layers * h * h * share

    @property
    def shape(self) -> ModelShape:
        inner = round(8 * self.hidden / 3 / self.tp) * self.tp
        return ModelShape(
            *(f"gpt-{self.billions:g}b", "llama", self.layers, self.hidden, inner),
            *(self.heads, self.heads, VOCAB, SEQ, True),
        )


N1, N2, K5 = "Narayanan, table 1", "Narayanan, table 2", "Korthikanti, table 5"
RUNS = [
    Run(N1, 1.7, 2304, 24, 24, 1, 1, 32, 512, 16, tflops=137),
    Run(N1, 3.6, 3072, 30, 32, 2, 1, 64, 512, 16, tflops=138),
    Run(N1, 7.5, 4096, 36, 32, 4, 1, 128, 512, 16, tflops=142),
    Run(N1, 18.4, 6144, 40, 48, 8, 1, 256, 1024, 8, tflops=135),
    Run(N1, 39.1, 8192, 48, 64, 8, 2, 512, 1536, 4, tflops=138),
    Run(N1, 76.1, 10240, 60, 80, 8, 4, 1024, 1792, 2, tflops=140, interleaved=3),
    Run(N1, 145.6, 12288, 80, 96, 8, 8, 1536, 2304, 2, tflops=148, interleaved=2),
    Run(N1, 310.1, 16384, 96, 128, 8, 16, 1920, 2160, 1, tflops=155, interleaved=2),
    Run(N1, 529.6, 20480, 105, 128, 8, 35, 2520, 2520, 1, tflops=163, interleaved=3),
    Run(N1, 1008.0, 25600, 128, 160, 8, 64, 3072, 3072, 1, tflops=163),
    *(Run(N2, 174.6, 12288, 96, 96, 8, 12, n, 1536, 1, tflops=t) for n, t in ((384, 153), (768, 149), (1536, 141))),
    *(Run(N2, 529.6, 20480, 105, 128, 8, 35, n, 2240, 1, tflops=t) for n, t in ((560, 171), (1120, 167), (2240, 159))),
    Run(K5, 22, 6144, 48, 64, 8, 1, 8, 4, 4, step_s=1.42),
    Run(K5, 22, 6144, 48, 64, 8, 1, 8, 4, 4, step_s=1.10, selective=True),
    Run(K5, 175, 12288, 96, 96, 8, 8, 64, 64, 1, step_s=18.13, interleaved=3),
    Run(K5, 175, 12288, 96, 96, 8, 8, 64, 64, 1, step_s=13.75, interleaved=3, selective=True),
    Run(K5, 530, 20480, 105, 128, 8, 35, 280, 280, 1, step_s=49.05, interleaved=3),
    Run(K5, 530, 20480, 105, 128, 8, 35, 280, 280, 1, step_s=37.83, interleaved=3, selective=True),
    Run(K5, 1008, 25600, 128, 160, 8, 64, 512, 512, 1, step_s=94.42),
    Run(K5, 1008, 25600, 128, 160, 8, 64, 512, 512, 1, step_s=71.49, selective=True),
]


def gpt_kept_bytes(run: Run) -> Callable[[int, int], float]:
    """What a layer of Megatron's GPT writes a token and rank: Korthikanti et al., table 2, at a width of two bytes."""

    def kept(seq: int, tp: int) -> float:
        whole = 0 if run.selective else 10  # norms and dropouts are split with Megatron-SP alone
        return run.hidden * (whole + (34 - whole) / tp) + 5 * run.heads * seq / tp

    return kept


def predicted_s(run: Run) -> float:
    """Step time of the run's plan by the analytic path."""
    assumed = Assumptions(run.selective, Precision.FP16, True, SEQ)
    cost = CostModel(
        run.shape,
        network=Network(analytic_hardware(SHEET, max(run.gpus // SHEET.gpus_per_node, 1))),
        times=ComputeTimes(
            analytic_computation(run.shape, SHEET, Precision.FP16, [SEQ], Fused.NONE, gpt_kept_bytes(run))
        ),
        memory=MemoryUse(analytic_memory(run.shape, Precision.FP16, [SEQ], Fused.NONE)),
        num_nodes=max(run.gpus // SHEET.gpus_per_node, 1),
        gpus_per_node=SHEET.gpus_per_node,
        assumed=assumed,
    )
    dp = run.gpus // (run.tp * run.pp)
    plan = uniform_plan(
        layers=run.layers,
        world_size=run.gpus,
        pp_deg=run.pp,
        global_tp_deg=run.tp,
        vocab_tp=run.tp,
        global_train_batch_size=run.batch,
        chunks=run.batch // (dp * run.micro_batch),
        assumed=assumed,
    )
    stages = even_stages(run.layers, run.pp * run.interleaved)
    again = Recompute.ATTENTION if run.selective else Recompute.FULL
    layers = tuple(replace(layer, recompute=again) for layer in plan.layers)
    return cost.predict(replace(plan, stages=stages, chunks=run.interleaved, layers=layers)).time_s


def row(run: Run) -> dict[str, Any]:
    step_s = predicted_s(run)
    return {
        "source": run.source,
        "model": f"{run.billions:g}B",
        "gpus": run.gpus,
        "tp": run.tp,
        "pp": run.pp,
        "micro_batch": run.micro_batch,
        "chunks": run.interleaved,
        "recompute": "selective" if run.selective else "full",
        "published_s": run.published_s,
        "predicted_s": step_s,
        "error": step_s / run.published_s - 1,
    }


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """The rows as Markdown, as the documents show them."""
    yield "| source | model | GPUs | tp | pp | micro-batch | chunks | recompute | published s | predicted s | error |"
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    for told in rows:
        *facts, published, predicted, error = told.values()
        cells = [*map(str, facts), f"{published:.2f}", f"{predicted:.2f}", f"{error:+.1%}"]
        yield f"| {' | '.join(cells)} |"


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    errors = [abs(told["error"]) for told in rows]
    return {"mean": statistics.mean(errors), "median": statistics.median(errors), "max": max(errors)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of the table")
    rows = [row(run) for run in RUNS]
    if parser.parse_args().json:
        print(json.dumps({"rows": rows, "errors": summary(rows)}))
        return
    for line in table(rows):
        print(line)
    print("\n" + ", ".join(f"{name} error {value:.1%}" for name, value in summary(rows).items()))


if __name__ == "__main__":
    main()
