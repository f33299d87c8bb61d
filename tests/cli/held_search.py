"""`python held_search.py N WORD…`: the command of these words, which stays inside the search's core once N families are
solved, until a signal ends it. Says `held` on stdout then."""

from __future__ import annotations

import sys
from math import inf
from typing import Any

from paddlenlp_galvatron.cli.main import main
from paddlenlp_galvatron.planner import engine

EFFORT = 10**12  # hours
solve = engine._Search._solve
solved: list[Any] = []


def held(search: Any, entry: Any, core: Any, *limits: Any, **last: Any) -> float:
    if len(solved) >= int(sys.argv[1]) and not search.cancel.cancelled:
        sys.stdout.write("held\n")
        sys.stdout.flush()
        while not search.cancel.cancelled:
            core.solve(inf, EFFORT, search.cancel)
    bound = solve(search, entry, core, *limits, **last)
    if bound == inf:
        solved.append(entry)
    return bound


engine._Search._solve = held  # type: ignore[method-assign]
if __name__ == "__main__":
    sys.exit(main(sys.argv[2:]))
