"""How to start training by a plan, for the commands that write or show a plan."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.model.config import load_model, preset_names
from paddlenlp_galvatron.model.unsupported import MTP_COUNTS
from paddlenlp_galvatron.plan import Plan
from paddlenlp_galvatron.report.plan import PlanOrigin

DATA = {"pretrain": "--input_dir DATA", "dpo": "--train_dataset_path DATA"}  # other tasks take a folder
MODEL_FOLDER = "MODEL_FOLDER"
START = "START"  # placeholder that keeps the lines of launchers short


def how_to_start(plan: Plan, path: Path) -> list[str]:
    """The command that trains by a plan, for its task; for several nodes also how each launcher starts it. None for a
    plan without model and cluster."""
    searched = PlanOrigin.of(plan.metadata.get("searched_from") or {})
    if searched is None:
        return []
    if trainer := searched.options.get("trainer"):
        return [f"arguments of {trainer}: galvatron plan to-{trainer} {path}"]
    if plan.assumed.products:
        return [f"planned only: training multiplies in mixed_precision, not in {plan.assumed.products}"]
    with suppress(UserError):  # a model given by sizes, or a removed folder
        if lacking := load_model(str(searched.model_options.get("model_size") or searched.model)).lacking:
            return [f"planned only: training lacks {lacking}"]
    words = ["start: galvatron train", str(path), *_task(searched)]
    if (nodes := searched.num_nodes) == 1:
        return [" ".join(words)]
    from paddlenlp_galvatron.launch.clusters import start_lines  # imported here: most plans have one node

    return [
        " ".join([*words, f"--nproc {searched.num_gpus_per_node}"]),
        f"on {nodes} nodes, with that line for {START}:",
        *(f"  {who}: {line}" for who, line in start_lines(START, nodes, searched.num_gpus_per_node).items()),
    ]


def _task(searched: PlanOrigin) -> list[str]:
    """Options of model, task and data. Fine-tuning starts from a folder of weights, which a preset does not have."""
    options: dict[str, Any] = searched.options
    task, rank = str(options.get("task", "pretrain")), options.get("lora_rank")
    named = searched.model if searched.model in preset_names() else MODEL_FOLDER  # a shape may be given by sizes
    model = str(searched.model_options.get("model_size") or named)
    mtp = searched.model_options.get(MTP_COUNTS[0])
    further = [] if mtp is None else [f"--{MTP_COUNTS[0]} {mtp}"]
    if task == "pretrain":
        return [f"--model {model}", *further, DATA[task]]
    words = [f"--model {model if Path(model).is_dir() else MODEL_FOLDER}", *further, f"--task {task}"]
    if rank:
        words.append(f"--lora_rank {rank}" if task == "lora" else f"--lora 1 --lora_rank {rank}")
    return [*words, DATA.get(task, "--dataset_name_or_path DATA")]
