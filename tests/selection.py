"""The choice of tests that run, and the lines at the end of a run that say so.

`pytest` runs the tests that bear neither `slow` nor `oracle`; `pytest -m ''` runs all. A file whose
`pytestmark` is `oracle` may import torch at its top: it is not imported where its tests would not run.
"""

from __future__ import annotations

import importlib.util
import os
import re
import time
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest

ORACLES = ("torch", "transformers")  # the extra test-all brings more; these tell whether it is installed
MARKS = ("oracle", "slow")  # a test that has both counts as the first
WHOLE_FILE = re.compile(r"^pytestmark = .*\boracle\b", re.MULTILINE)
BUDGET_S = 2.0
FAILS_S = 20.0  # with --budget: a loop that runs away; a test within its budget stays far below
WORKERS = 8  # more of them spend their time starting: each imports everything

left_out = pytest.StashKey["Counter[str]"]()
over_budget: list[tuple[float, str]] = []  # seconds and name, of this process's run


def missing() -> list[str]:
    return [name for name in ORACLES if importlib.util.find_spec(name) is None]


def oracles_run(config: pytest.Config) -> bool:
    return "not oracle" not in config.option.markexpr and not missing()


# ---- before a run


def pytest_addoption(parser: pytest.Parser) -> None:
    text = f"fail if a test without a mark takes over {FAILS_S:g} s, by the clock and of processor time"
    parser.addoption("--budget", action="store_true", help=text)


def pytest_configure(config: pytest.Config) -> None:
    config.stash[left_out] = Counter()
    over_budget.clear()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Return 0, no workers, if files are named: one file is done before workers have started."""
    if any(arg.partition("::")[0].endswith(".py") for arg in config.args):
        return 0
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cpus, WORKERS)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if collection_path.suffix != ".py" or not collection_path.name.startswith("test_") or oracles_run(config):
        return None
    if not WHOLE_FILE.search(collection_path.read_text(encoding="utf-8")):
        return None
    asked = [config.invocation_params.dir / arg.partition("::")[0] for arg in config.args]
    if any(
        collection_path.is_relative_to(path) for path in asked
    ):  # files beside those asked for are seen too
        config.stash[left_out]["files"] += 1
    return True


def pytest_deselected(items: list[pytest.Item]) -> None:
    for item in items:
        mark = next((m for m in MARKS if item.get_closest_marker(m)), None)
        if mark:
            item.config.stash[left_out][mark] += 1


# ---- a test


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("oracle") and missing():
        pytest.skip(f"needs {' and '.join(missing())}: pip install '.[test-all]'")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Note a test over its budget. A busy machine stretches the clock; threads add up processor time."""
    clock, processors = time.perf_counter(), _processors()
    yield
    took = min(time.perf_counter() - clock, _processors() - processors)
    if took > BUDGET_S and not any(item.get_closest_marker(mark) for mark in MARKS):
        item.user_properties.append(("over budget", took))


def _processors() -> float:
    """Return the processor time of this process and of the children that ended."""
    return sum(os.times()[:4])


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call":
        noted = [float(str(v)) for k, v in report.user_properties if k == "over budget"]
        over_budget.extend((took, report.nodeid) for took in noted)


# ---- after a run


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object, error: object) -> None:
    """Take over what a worker of pytest-xdist left out: each collects everything, so one's counts do."""
    counts = getattr(node, "workeroutput", {}).get("left out")
    config = getattr(node, "config", None)
    if counts and isinstance(config, pytest.Config):
        config.stash[left_out] = Counter(counts)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    config = session.config
    output = getattr(config, "workeroutput", None)
    if output is not None:
        counts = config.stash[left_out]
        output["left out"] = dict(counts)
    elif config.option.budget and any(took > FAILS_S for took, _ in over_budget) and exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for took, name in sorted(over_budget, reverse=True):
        terminalreporter.write_line(f"over {BUDGET_S:g} s without a mark: {name} ({took:.1f} s)")
    counts = config.stash[left_out]
    if counts and not config.option.keyword:
        terminalreporter.write_line(said(counts))


def said(counts: Counter[str]) -> str:
    """Return one line that says what a run left out."""
    parts = [f"{counts[mark]} tests marked {mark}" for mark in MARKS if counts[mark]]
    if counts["files"]:
        parts.insert(0, f"{counts['files']} files of tests that need torch or a browser")
    return f"Not run: {', '.join(parts)}. All: pip install '.[test-all]' && pytest -m ''"
