"""How a run on several nodes is started, for the commands that write or show its plan."""

from __future__ import annotations

from pathlib import Path

from paddlenlp_galvatron.plan import Plan
from paddlenlp_galvatron.report.plan import Origin


def how_to_start(plan: Plan, path: Path) -> list[str]:
    """The lines that start a plan for several nodes, by who starts it; none for a plan of one node."""
    searched = Origin.of(plan.metadata.get("searched_from") or {})
    if searched is None or searched.num_nodes == 1:
        return []
    from paddlenlp_galvatron.launch.clusters import start_lines  # here, as most plans have one node

    command = f"galvatron train {path} --model {searched.model} --input_dir DATA --nproc {searched.num_gpus_per_node}"
    lines = start_lines(command, searched.num_nodes, searched.num_gpus_per_node)
    return [f"start on {searched.num_nodes} nodes:", *(f"  {who}: {line}" for who, line in lines.items())]
