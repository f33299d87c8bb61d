"""Which plan is best: the space, the exact search over it by the C++ core, and its answer with a certificate.

`options` has the choices to search, `space` lists families of plans and their strategies, `core_arrays` prices a family
for the core, `engine` goes through families by their lower bounds, `result` is the answer. `search_engine/README.md`
describes the core, which bounds and solves one family. `question` settles the question of a search from options, its
prices included. Others are answered by several searches: `fit` (how many GPUs), `form` (of the what-if page),
`explain` and `scale`; the last two take their options from a plan's file (`origin`).
"""

from .engine import search
from .options import SearchOptions
from .result import Candidate, FamilyOutcome, Need, SearchResult
