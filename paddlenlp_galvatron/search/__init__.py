"""Which plan is best: the space, the exact search over it by the C++ core, and its answer with a certificate."""

from .engine import search
from .options import SearchOptions
from .result import Candidate, FamilyOutcome, Need, SearchResult
from .solver import Solution, solve

__all__ = ["Candidate", "FamilyOutcome", "Need", "SearchOptions", "SearchResult", "Solution", "search", "solve"]
