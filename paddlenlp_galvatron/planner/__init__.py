"""Which plan is best: the space, the exact search over it by the C++ core, and its answer with a certificate.

`options` says what may be tried, `space` lists families of plans and their strategies, `core_arrays` prices a family
for the core, `engine` goes through families by their lower bounds, `result` is the answer. `search_engine/README.md`
describes the core, which bounds and solves one family. Questions that are searched: `fit` (how many cards), `explain`
with `what_ifs`, `scale`, `form` (of the what-if page). `problem` has the inputs of a plan's search, `prices` says whose
prices. `solver` solves a chain of layers by itself.
"""

from .engine import search
from .options import SearchOptions
from .result import Candidate, FamilyOutcome, Need, SearchResult
from .solver import Solution, solve

__all__ = ["Candidate", "FamilyOutcome", "Need", "SearchOptions", "SearchResult", "Solution", "search", "solve"]
