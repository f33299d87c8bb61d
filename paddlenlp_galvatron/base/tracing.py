"""Chrome-trace JSON, which Perfetto shows: one rank's, and all ranks' in one file."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .reading import read_json
from .units import GIB
from .writing import write_text

LARGEST_BYTES = GIB  # limit for one rank's events

Event = dict[str, Any]  # name, cat, ph, ts and dur in us, pid (the rank), tid


def write_trace(path: Path, events: Iterable[Event], names: Mapping[int, str]) -> None:
    """All events, in order of time and beginning at 0. `names`: of each pid."""
    ordered = sorted(events, key=lambda event: (event["ts"], -event["dur"]))
    begin = ordered[0]["ts"] if ordered else 0.0
    titles = [
        {"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": name}}
        for pid, name in sorted(names.items())
    ]
    moved = [event | {"ts": round(event["ts"] - begin, 3), "dur": round(event["dur"], 3)} for event in ordered]
    write_text(path, json.dumps({"traceEvents": [*titles, *moved], "displayTimeUnit": "ms"}) + "\n")


def write_events(path: Path, events: Sequence[Event]) -> None:
    """Write the events of one rank, to be joined."""
    write_text(path, json.dumps(list(events)) + "\n")


def join_traces(path: Path, parts: Sequence[Path]) -> None:
    """One file of the ranks' traces. Raises UserError for a file that is none."""
    events = [event for rank_path in parts for event in read_json(rank_path, LARGEST_BYTES)]
    write_trace(path, events, {event["pid"]: f"rank {event['pid']}" for event in events})
