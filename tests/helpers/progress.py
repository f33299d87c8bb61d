"""Progress of a long test run: a line for each finished file with the time left, failures at once, and at the end which
programs were missing.

Times of the last run, in pytest's cache, weigh the tests.
"""

import os
import re
import time
from collections import Counter, defaultdict
from collections.abc import Generator, Sequence
from typing import Any

import pytest

SECONDS = "galvatron/seconds"  # key of the cache: test -> s
UNKNOWN_S = 1.0  # of a test that has not run yet
# The form of reasons that name a program which can be installed; with CI=true such a skip is a failure.
MISSING = re.compile(r"needs the program (\S+)")


class Progress:
    def __init__(self, config: pytest.Config):
        assert config.cache
        self._cache, self._writer = config.cache, config.get_terminal_writer()
        self._known: dict[str, float] = self._cache.get(SECONDS, {})
        self._start = time.monotonic()
        self._left: dict[str, set[str]] = defaultdict(set)  # tests of a file
        self._expected = self._done = 0.0
        self._taken: Counter[str] = Counter()  # s of tests that are done
        self._results: dict[str, Counter[str]] = defaultdict(Counter)

    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        for test in ids:
            self._left[_file(test)].add(test)
        self._expected = sum(map(self._weight, ids))

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str]:
        """The test's list at the end, and no letter."""
        if report.when == "call" or report.skipped:
            return report.outcome, "", report.outcome.upper()
        return ("error", "", "ERROR") if report.failed else ("", "", "")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test, file = report.nodeid, _file(report.nodeid)
        self._taken[test] += report.duration
        if report.failed or report.skipped or report.when == "call":
            self._results[file][report.outcome] += 1
        if report.failed:
            self._writer.line(f"FAILED {test} ({report.when})")
        if report.when == "teardown" and test in self._left[file]:
            self._left[file].discard(test)
            self._done += self._weight(test)
            if not self._left[file]:
                self._show(file)

    def _show(self, file: str) -> None:
        elapsed, share = time.monotonic() - self._start, min(self._done / self._expected, 1.0)
        left = elapsed * (1 - share) / share
        results = ", ".join(f"{count} {outcome}" for outcome, count in sorted(self._results[file].items()))
        self._writer.line(f"{share:4.0%}, {left // 60:.0f}:{left % 60:02.0f} left  {file}  {results}")

    def _weight(self, test: str) -> float:
        return self._known.get(test, UNKNOWN_S)

    def pytest_sessionfinish(self) -> None:
        self._cache.set(SECONDS, self._known | {test: round(taken, 2) for test, taken in self._taken.items()})

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        reasons = Counter(_reason(report) for report in terminalreporter.stats.get("skipped", ()))
        listed = "; ".join(f"{count} x {reason}" for reason, count in reasons.most_common())
        terminalreporter.write_line(f"skipped: {listed or 'nothing'}")
        unfinished = sum(map(len, self._left.values()))
        if unfinished:
            terminalreporter.write_line(f"interrupted: {unfinished} tests did not run; those above had ended")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """CI installs the programs that tests need, so a missing one is a fault there."""
    report = yield
    if report.skipped and os.environ.get("CI") == "true" and MISSING.search(_reason(report)):
        report.outcome, report.longrepr = "failed", f"{_reason(report)}, which CI must install"
    return report


def _file(test: str) -> str:
    return test.partition("::")[0]


def _reason(report: pytest.TestReport) -> str:
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")
