"""The launchers of several nodes exchange their ranks' faults and end with the same fault.

They use the store of node 0: other nodes write reports every second and read the verdict, the fault that node 0 chooses
from the reports. A node that is silent for SILENT_S has died, is frozen, or cannot be reached.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ..base.errors import GalvatronError
from .faults import Fault, FaultClassifier, FaultKind, Wait
from .nodes import Nodes
from .store import MEETING_S, TOKEN_VARIABLE, StoreClient, StoreServer

BEAT_S = 1.0
SILENT_S = 20.0  # a node that is silent for longer has failed
LATE_S = 3.0  # wait for a node that has not joined yet
PATIENCE_S = 5.0  # limit for the store's answer
VERDICT_S = 40.0  # wait for node 0's verdict, which may have to detect a silent node
VERDICT = "galvatron/verdict"
NOT_THERE = "did not appear within"


class SingleNode:
    """A launch of one node."""

    def __init__(self) -> None:
        self._classifier = FaultClassifier()

    def verdict(self, faults: Sequence[Fault], stalled: Sequence[Fault], waits: Sequence[Wait]) -> Fault | None:
        """The fault that ends the launch, from the faults of this node's ranks; None: no fault, or not known yet."""
        return self._classifier.verdict(faults, stalled, waits)

    def report_end(self, why: str) -> None:
        """Report that this launcher ends before its ranks."""

    def close(self) -> None:
        """End the exchange."""


@dataclass
class Report:
    """A node's report of its ranks."""

    faults: list[Fault] = field(default_factory=list)
    stalled: list[Fault] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    beat: int = 0
    ended: bool = False

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, text: bytes) -> Report:
        fields = json.loads(text)
        lists = {name: [_fault(entry) for entry in fields[name]] for name in ("faults", "stalled")}
        return cls(**fields | lists | {"waits": [Wait(**entry) for entry in fields["waits"]]})


class Leader(SingleNode):
    """Node 0, which serves the store."""

    def __init__(self, nodes: Nodes, server: StoreServer):
        super().__init__()
        self._others, self._server = range(1, nodes.num_nodes), server
        self._beats = {node: (-1, time.monotonic()) for node in self._others}  # last heartbeat and its arrival

    def verdict(self, faults: Sequence[Fault], stalled: Sequence[Fault], waits: Sequence[Wait]) -> Fault | None:
        faults, stalled, waits = [*faults], [*stalled], [*waits]
        longest, now = 0.0, time.monotonic()
        for node, report in self._reports().items():
            if report.beat != self._beats[node][0]:
                self._beats[node] = (report.beat, now)
            beat, since = self._beats[node]
            faults += report.faults
            stalled += report.stalled
            waits += report.waits
            if not report.ended:
                longest = max(longest, now - since)
                limit, how = (SILENT_S, "has sent nothing for") if beat > 0 else (MEETING_S, "did not join within")
                if now - since > limit:
                    faults.append(Fault(FaultKind.CAUSE, None, f"node {node} {how} {limit:.0f} s", now - since))
        fault = self._classifier.verdict(faults, stalled, waits, all_present=longest < LATE_S)
        if fault:
            self._decide(fault)
        return fault

    def report_end(self, why: str) -> None:
        self._decide(Fault(FaultKind.CAUSE, None, f"node 0: {why}"))

    def _reports(self) -> dict[int, Report]:
        keys = self._server.keys()
        return {node: Report.decode(keys[_key(node)]) if _key(node) in keys else Report() for node in self._others}

    def _decide(self, fault: Fault) -> None:
        """End the other launchers with this fault, and wait for them."""
        self._server.set(VERDICT, json.dumps(asdict(fault)).encode())
        deadline = time.monotonic() + LATE_S
        while time.monotonic() < deadline and not all(report.ended for report in self._reports().values()):
            time.sleep(BEAT_S / 10)


class Follower(SingleNode):
    """A node other than node 0. It reports from a thread, so that blocked output does not silence it."""

    def __init__(self, nodes: Nodes, token: str):
        super().__init__()
        self._nodes, self._token = nodes, token
        self._report = Report()
        self._verdict: Fault | None = None
        self._silence: Fault | None = None  # fault: node 0 is silent
        self._first: float | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    def verdict(self, faults: Sequence[Fault], stalled: Sequence[Fault], waits: Sequence[Wait]) -> Fault | None:
        self._report = Report([*faults], [*stalled], [*waits])
        if self._verdict:
            return self._verdict
        fault = self._classifier.verdict([*faults, *filter(None, [self._silence])], stalled, waits)
        if fault is None or self._silence:
            return fault
        self._first = self._first or time.monotonic()
        return fault if time.monotonic() - self._first > VERDICT_S else None

    def report_end(self, why: str) -> None:
        self._report = Report([Fault(FaultKind.CAUSE, None, f"node {self._nodes.node_rank}: {why}")])

    def close(self) -> None:
        self._closed.set()
        self._thread.join(2 * PATIENCE_S)

    def _beat(self) -> None:
        """Connect to node 0, which may start later or have disappeared."""
        address, port = self._nodes.master_addr, self._nodes.master_port or 0
        client: StoreClient | None = None
        received, limit, beats, last = time.monotonic(), MEETING_S, 0, False
        while not last:
            last = self._closed.wait(BEAT_S)
            try:
                client = client or StoreClient(address, port, self._token, PATIENCE_S)
                limit = SILENT_S
                content = client.get(VERDICT)
                self._verdict = _fault(json.loads(content)) if content else None
                beats, last = beats + 1, last or bool(content)
                report = replace(self._report, beat=beats, ended=last)
                client.set(_key(self._nodes.node_rank), report.encode())
                received = time.monotonic()
            except OSError:
                if client:
                    client.close()
                client = None
                if (silent_s := time.monotonic() - received) > limit:
                    how = NOT_THERE if limit == MEETING_S else "has sent nothing for"
                    message = f"node 0 ({address}:{port}) {how} {limit:.0f} s"
                    self._silence = Fault(FaultKind.CAUSE, None, message, silent_s)
                    return
        if client:
            client.close()


def watch(nodes: Nodes, server: StoreServer | None, token: str) -> SingleNode:
    """The watch of this node."""
    if nodes.num_nodes == 1:
        return SingleNode()
    return Leader(nodes, server) if server else Follower(nodes, token)


def await_first(nodes: Nodes, timeout_s: float = MEETING_S) -> None:
    """Wait until node 0 has started: its command was not refused. Raises GalvatronError."""
    address, port, timeout_s = nodes.master_addr, nodes.master_port or 0, min(timeout_s, MEETING_S)
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            client = StoreClient(address, port, os.environ.get(TOKEN_VARIABLE, ""), PATIENCE_S)
            message = client.get(VERDICT)  # the store of another launch disconnects
            client.close()
        except OSError:
            time.sleep(BEAT_S / 4)
            continue
        if message:
            raise GalvatronError(_fault(json.loads(message)).message)
        return
    raise GalvatronError(f"node 0 ({address}:{port}) {NOT_THERE} {timeout_s:.0f} s; was its command refused?")


def _key(node: int) -> str:
    return f"galvatron/node/{node}"


def _fault(fields: dict[str, Any]) -> Fault:
    return Fault(**fields | {"kind": FaultKind(fields["kind"])})
