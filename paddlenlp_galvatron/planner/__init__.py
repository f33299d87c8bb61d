"""Finds the best plan: the search space, the exact search by the C++ core, and its answer with a certificate.

`options` has the choices to search, `space` lists families of plans and their strategies, `core_arrays` prices a family
for the core, `engine` searches families in the order of their lower bounds, `result` is the answer.
`search_engine/README.md` describes the core, which bounds and solves one family. `question` builds a search's question
from options, including its prices. Other questions need several searches: `fit` (number of GPUs), `form` (the what-if
page), `explain` and `scale`; the last two take their options from a plan's file (`origin`).
"""

from .engine import search
from .options import SearchOptions
from .result import Candidate, FamilyOutcome, Need, SearchResult
