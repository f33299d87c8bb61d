"""Which plan is best: the space, the exact search over it by the C++ core, and its answer with a certificate.

`options` says what may be tried, `space` lists families of plans and their strategies, `tables` prices a family for
the core, `engine` goes through families by their lower bounds, `result` is the answer. `search_engine/README.md`
describes the core, which bounds and solves one family. Beside them: `fit` (how many cards), `device` (whose
prices), `solver` (a chain of layers by itself).
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

from .engine import search
from .options import SearchOptions
from .result import Candidate, FamilyOutcome, Need, SearchResult
from .solver import Solution, solve

__all__ = ["Candidate", "FamilyOutcome", "Need", "SearchOptions", "SearchResult", "Solution", "search", "solve"]


class _CallablePackage(ModuleType):
    """`galvatron.search("qwen2.5-7b", …)` is a command and the name of this sub-package: both work."""

    def __call__(self, *model: Any, **options: Any) -> Any:
        return import_module("..api", __package__).search(*model, **options)


sys.modules[__name__].__class__ = _CallablePackage
