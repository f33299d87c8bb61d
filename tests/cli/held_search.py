"""`python held_search.py N WORD…`: the command of these words, which stays inside the search's core once N families are
solved, until a signal ends it. Says `held` on stdout then."""

import sys
from math import inf
from typing import Any

from paddlenlp_galvatron.cli.main import main
from paddlenlp_galvatron.planner.branch_and_bound import BranchAndBound

EFFORT = 10**12  # hours
solve = BranchAndBound._solve
solved: list[Any] = []


def held(solver: BranchAndBound, entry: Any, *limits: Any) -> Any:
    cancel = solver.cores.cancel
    if len(solved) >= int(sys.argv[1]) and not cancel.cancelled:
        sys.stdout.write("held\n")
        sys.stdout.flush()
        while not cancel.cancelled:
            entry.core.solve(inf, EFFORT, cancel)
        return entry.bound  # the family stays open: a small one would find its plan in spite of the signal
    bound = solve(solver, entry, *limits)
    if bound is None:
        solved.append(entry)
    return bound


BranchAndBound._solve = held  # type: ignore[method-assign]
if __name__ == "__main__":
    sys.exit(main(sys.argv[2:]))
