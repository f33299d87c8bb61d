"""Plans in other programs' words: commands of `galvatron plan`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from json import dumps
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from paddlenlp_galvatron.base import UserError, count, within
from paddlenlp_galvatron.base.limits import Ranks
from paddlenlp_galvatron.base.printing import say
from paddlenlp_galvatron.options.group import Options
from paddlenlp_galvatron.options.model_options import model_of_plan
from paddlenlp_galvatron.plan import ModelShape, Plan, load_model, read_plan, write_plan
from paddlenlp_galvatron.plan.check import require_fits

from .command import answer, say_note

if TYPE_CHECKING:
    from paddlenlp_galvatron.plan.export import Argument

CLUSTER = re.compile(r"_(\d{1,6})nodes_(\d{1,6})gpus_per_node_")  # part of Galvatron's file names


class PlanFileOptions(Options):
    """A plan file, its number of ranks, and the model to check it against."""

    model_size: str | None = None
    file: Path
    world_size: Ranks | None = None


class RecipeOptions(PlanFileOptions):
    """A recipe of PaddleFleet."""

    output: Path | None = None


def read(file: Path, args: PlanFileOptions | None = None, valid: bool = True) -> tuple[Plan, ModelShape | None]:
    """The plan of a file, and the model that `args` names, if any. Raises UserError; with `valid` also for a plan that
    cannot run."""
    named = CLUSTER.search(file.name)
    ranks = int(named[1]) * int(named[2]) if named else None
    plan = read_plan(file, args.world_size if args else None, default=ranks, smallest_world=True, valid=valid)
    shape = model_of_plan(plan, args.model_size).shapes[0] if args and args.model_size else None
    if valid:
        require_fits(plan, shape)
    return plan, shape


def to_paddlenlp(values: dict[str, Any], json: bool) -> None:
    """Print a plan as arguments of PaddleNLP's own run_pretrain.py. Exit code 2 if they cannot express it."""
    from paddlenlp_galvatron.plan.export import as_flags, stock_arguments, stock_notes

    arguments = _arguments("paddlenlp", stock_arguments, stock_notes, values)
    say(dumps(arguments, indent=2) if json else "\n".join(as_flags(arguments)))


def to_paddlefleet(values: dict[str, Any], json: bool) -> None:
    """Print a plan as YAML for PaddleFleet's `paddlefleet-cli train`. Exit code 2 if it cannot express it."""
    _say_yaml("paddlefleet", values, json)


def from_paddlefleet(values: dict[str, Any], json: bool) -> None:
    """Write the plan of a PaddleFleet recipe (YAML). Exit code 2 names every field that a plan cannot express."""
    args = RecipeOptions.from_values(values)
    plan, notes = of_recipe(args.file, args.model_size, args.world_size)
    path, model = args.output or args.file.with_suffix(".plan.json"), plan.metadata["searched_from"]["model"]
    write_plan(plan, path)
    text = f"{path}: the plan of {args.file} for {model} on {count(plan.world_size, 'rank')}"
    answer(text, json, plan=path, model=model, world_size=plan.world_size, notes=notes)


def of_recipe(
    file: Path, model_size: str | None, world_size: int | None, by_default: int | None = None
) -> tuple[Plan, tuple[str, ...]]:
    """The plan of a recipe; shows its notes. `by_default`: ranks of a recipe that states none. Raises UserError."""
    from paddlenlp_galvatron.base.reading import read_yaml
    from paddlenlp_galvatron.options.fleet import read_recipe
    from paddlenlp_galvatron.options.fleet_fields import fields_of, is_recipe
    from paddlenlp_galvatron.plan.fleet_layers import MTP
    from paddlenlp_galvatron.planner.options import SearchOptions

    content = read_yaml(file)
    if not is_recipe(content):
        raise UserError(f"{file}: is no recipe of PaddleFleet; give one that has a stage such as PT or SFT")
    read = fields_of(content).read
    if read.sharding_parallel_size < 1:
        world_size = world_size or by_default
    if not (named := model_size or read.model_name_or_path):
        raise UserError("model_size: missing in the recipe; add it: galvatron plan from-paddlefleet --model_size NAME")
    shape = load_model(named)
    with within(str(file)):
        recipe = read_recipe(content, shape, world_size)
    options = {"model_size": named} | ({MTP: recipe.model.mtp_layers} if shape.most_mtp_layers else {})
    searched: dict[str, Any] = {"model": shape.name, "model_options": options}
    if recipe.asked != {"task": "pretrain"}:
        searched["options"] = recipe.asked | {"world_size": recipe.plan.world_size}
        searched["options"] |= SearchOptions.wide_enough(recipe.plan)
    for note in recipe.notes:
        say_note(note)
    return replace(recipe.plan, metadata={"searched_from": searched}), recipe.notes


def to_paddleformers(values: dict[str, Any], json: bool) -> None:
    """Print a plan as YAML for PaddleFormers (now part of PaddleFleet). Exit code 2 if it cannot express it."""
    _say_yaml("paddleformers", values, json)


def _say_yaml(program: str, values: dict[str, Any], json: bool) -> None:
    from paddlenlp_galvatron.plan.export import FLEET, PIN, PROGRAMS, fleet_arguments, fleet_notes

    title = PROGRAMS[program]
    express, notes_of = partial(fleet_arguments, program=title), partial(fleet_notes, program=title)
    arguments = _arguments(program, express, notes_of, values)
    head = [f"# for PaddleFleet {PIN}"] * (title == FLEET)
    lines = (_yaml_line(name, value) for name, value in arguments.items())
    answer("\n".join([*head, *lines]), json, **arguments)


def _yaml_line(name: str, value: Argument) -> str:
    """An argument as YAML, lists of layers on one line."""
    flow = None if isinstance(value, dict) else False
    return str(yaml.safe_dump({name: value}, default_flow_style=flow, width=inf)).rstrip()


def _arguments(
    program: str,
    express: Callable[[Plan, ModelShape | None], dict[str, Argument]],
    notes_of: Callable[[Plan], list[str]],
    values: dict[str, Any],
) -> dict[str, Argument]:
    """A plan as another program's arguments; shows its notes. `program`: a name of --trainer. Raises UserError with the
    file and each field that the program cannot express, with its cost where the plan can be priced."""
    args = PlanFileOptions.from_values(values)
    plan, shape = read(args.file, args)
    searched = plan.metadata.get("searched_from") or {}
    with within(str(args.file)):
        if shape is None and (program == "paddlefleet" or searched.keys() & {"model", "model_options"}):
            [shape, *_] = model_of_plan(plan).shapes
            require_fits(plan, shape)
        try:
            arguments = express(plan, shape)
        except UserError as error:
            costs = _costs_of_gaps(program, args)
            raise UserError(fault + costs.get(fault.split(":")[0], "") for fault in error.faults) from None
    for note in [*([plan.note] if plan.note else []), *notes_of(plan)]:
        say_note(note)
    return arguments


def _costs_of_gaps(program: str, args: PlanFileOptions) -> dict[str, str]:
    """The cost of each field that the program cannot express, to append to its fault; empty without prices."""
    from paddlenlp_galvatron.planner.gap_costs import costs_of_gaps
    from paddlenlp_galvatron.planner.origin import OriginOptions, read_origin

    try:
        plan, question = read_origin(OriginOptions(plan=args.file, model_size=args.model_size))
        return costs_of_gaps(plan, question, program)
    except UserError:
        return {}
