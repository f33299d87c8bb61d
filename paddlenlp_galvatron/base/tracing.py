"""Chrome-trace JSON, which Perfetto shows: one rank's, and all ranks' in one file."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .reading import read_json
from .units import GIB
from .writing import write_text

LARGEST_BYTES = GIB  # limit for the events of a rank

Event = dict[str, Any]  # name, cat, ph, ts and dur in us, pid (the rank), tid


def write_trace(path: Path, events: Iterable[Event], names: Mapping[int, str]) -> None:
    """All events, sorted by time, which starts at 0. `names`: the name of each pid."""
    ordered = sorted(events, key=lambda event: (event["ts"], -event["dur"]))
    begin = ordered[0]["ts"] if ordered else 0.0
    titles = [
        {"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": name}}
        for pid, name in sorted(names.items())
    ]
    moved = [event | {"ts": round(event["ts"] - begin, 3), "dur": round(event["dur"], 3)} for event in ordered]
    write_text(path, json.dumps({"traceEvents": [*titles, *moved], "displayTimeUnit": "ms"}) + "\n")


def write_events(path: Path, events: Sequence[Event]) -> None:
    """Write the events of one rank; `joined` merges the ranks."""
    write_text(path, json.dumps(list(events)) + "\n")


def join_traces(path: Path, parts: Sequence[Path]) -> None:
    """Merge the ranks' traces into one file. Raises UserError for a file that is not a trace."""
    events = [event for rank_path in parts for event in read_json(rank_path, LARGEST_BYTES)]
    write_trace(path, events, {event["pid"]: f"rank {event['pid']}" for event in events})
