"""Settings of every test, and the tally of excused differences."""

from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

# Tests do not time: a slow machine is not a failure.
settings.register_profile("specdec", deadline=None)
settings.load_profile("specdec")

MOST_EXCUSED = 0.01  # share of the outputs that were compared between numbers of ranks
TALLY = pytest.StashKey[Counter[str]]()


@pytest.fixture
def num_threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Threads of torch while a test runs, given by an indirect parameter."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def pytest_configure(config: pytest.Config) -> None:
    config.stash[TALLY] = Counter()
    config.pluginmanager.register(_Tally(config.stash[TALLY]))


class _Tally:
    """Adds up what tests recorded, also those that ran in other processes."""

    def __init__(self, counts: Counter[str]) -> None:
        self._counts = counts

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            self._counts.update(
                {name: count for name, count in report.user_properties if name in ("compared", "excused")}
            )


def pytest_sessionfinish(session: pytest.Session) -> None:
    counts = session.config.stash[TALLY]
    if counts["excused"] > max(1, MOST_EXCUSED * counts["compared"]):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    counts = config.stash[TALLY]
    if counts["compared"]:
        terminalreporter.write_line(
            f"outputs compared between numbers of ranks: {counts['compared']}, first differences excused: "
            f"{counts['excused']} (at most {MOST_EXCUSED:.0%} may be)"
        )
