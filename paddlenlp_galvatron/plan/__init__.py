"""Parallel strategies: dataclasses, the JSON file, validation, rank layout, schedules.

`strategy` has the dataclasses, `file` their JSON format, made of `fields`; `dialects` reads other programs' files,
`export` writes their arguments. `check` has the rules, `uniform` the stages of like layers. `mesh`
has the axes of a stage's ranks, `comm_points` the collectives of each axis and its weights, `layout` the tokens of
each rank, `communicators` the groups of a launch. `schedule` has the order of passes of each pipeline schedule.
"""

from ..model import ModelShape, Recompute, load_model
from .assumption import Assumption
from .check import find_faults, require_trainable, require_valid, with_assumptions, with_defaults
from .file import json_schema, plan_from_dict, plan_id, plan_to_dict, read_plan, write_plan
from .mesh import Axis, Mesh
from .precision import Precision, Products
from .schedule import ByKind, PassKind, Schedule
from .strategy import Assumptions, DataParallel, LayerStrategy, Load, Plan, Strategy, VocabStrategy, load_summary, runs
from .uniform import even_stages
