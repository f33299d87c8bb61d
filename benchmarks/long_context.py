"""What context parallelism is worth at long samples, as planned on nodes of 8 H100 from their data sheet.

Steps have 4 Mi tokens whatever their length. Both searches may use tensor parallelism with Megatron-SP and Ulysses up
to degree 32, recompute, ZeRO and pipelines; the second one context parallelism up to degree 32, too. A model whose
positions end earlier is given as many as a sample has.

    python benchmarks/long_context.py [model …] [--gpus 8,64] [--lengths 32,128]
"""

from __future__ import annotations

import argparse

from on_data_sheet import KI, problem
from rich.console import Console
from rich.table import Table

from paddlenlp_galvatron.plan import Schedule
from paddlenlp_galvatron.plan.strategy import Plan
from paddlenlp_galvatron.report.fit import in_words
from paddlenlp_galvatron.search import search

WIDEST = 32  # degree of each kind


def fastest(name: str, seq: int, gpus: int, max_cp_deg: int) -> tuple[Plan | None, float]:
    """The plan, if any fits, and tokens a second."""
    most = {"max_tp_deg": WIDEST, "max_cp_deg": max_cp_deg}
    cost, options = problem(name, gpus, seq, pipeline_type=Schedule.ONE_F_ONE_B, **most)
    result = search(cost.models, cost, options)
    return (result.plan, result.best.samples_per_s * seq) if result.best else (None, 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["llama3.1-8b", "qwen2.5-7b"])
    parser.add_argument("--gpus", default="8,64,256")
    parser.add_argument("--lengths", default="32,128,512", help="in Ki tokens")
    given = parser.parse_args()
    table = Table("model", "tokens", "GPUs", "without cp", "plan", "with cp", "plan", "times")
    for name in given.models:
        for length in map(int, given.lengths.split(",")):
            for gpus in map(int, given.gpus.split(",")):
                (plain, before), (wide, after) = (fastest(name, length * KI, gpus, most) for most in (1, WIDEST))
                row = [name, f"{length}K", str(gpus)]
                for plan, speed in ((plain, before), (wide, after)):
                    row += [f"{speed:,.0f}", in_words(plan)] if plan else ["-", "does not fit"]
                table.add_row(*row, f"{after / before:.2f}" if before else "-")
    Console(width=220).print(table)


if __name__ == "__main__":
    main()
