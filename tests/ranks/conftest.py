"""Run the tests of this folder on every rank of a launch.

A test takes ``driver`` (:class:`tests.ranks.drivers.base.Driver`), or nothing. It runs through every driver of
``launches.py``, or those that it names, and inside it each rank calls collectives as a user's program does::

    @pytest.mark.drivers("ddp")  # often for a whole file: pytestmark = pytest.mark.drivers("ddp")
    def test_no_sync_accumulates(driver): ...

    @pytest.mark.excepted("tensorflow", "each gradient has a graph of its own", refused=["bucket_elements"])
    def test_buckets_join_small_tensors(driver): ...  # TensorFlow refuses this with these words; without ``refused``
                                                      # the driver does not promise it, and is not tried
    @pytest.mark.also("three ranks", "two levels")  # besides two ranks
    @pytest.mark.only("three ranks")

The ranks are started once for all tests of a driver and a launch, since that takes seconds. On each rank, pytest runs
these tests in the same order, and all ranks meet after each test. The ranks write reports to a folder, and the report
of the first rank that failed is the test's.
"""

from __future__ import annotations

import ast
import json
import os
import tempfile
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests import ROOT
from tests.launching import launch, num_nodes_of, world_size_of
from tests.ranks.drivers import driver_of
from tests.ranks.drivers.loopback import in_threads
from tests.ranks.launches import LAUNCHES, PACKAGES, SECONDS, SECONDS_PER_TEST, SLOW

REPORTS = "HVDCOMPRESS_TEST_REPORTS"  #: variable of a rank's environment: the folder for its reports
ON_A_RANK = REPORTS in os.environ
MARKS = (
    "drivers(name, ...): the test is for these drivers alone",
    "also(kind, ...): the test is run in launches of these kinds, too",
    "only(kind, ...): the test is run in launches of these kinds alone",
    "excepted(driver, reason, refused=[], kind=None): the driver does not promise this, or refuses it with these words",
)

HERE = Path(__file__).parent

Launch = tuple[str, str]  #: driver, launch
Reports = dict[str, list[pytest.TestReport]]  #: by test


def pytest_configure(config: pytest.Config) -> None:
    for mark in MARKS:
        config.addinivalue_line("markers", mark)
    if ON_A_RANK:
        config.pluginmanager.register(Rank(config), "rank")


# -- which launches a test runs in ----------------------------------------------------------------


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Import the files of one framework on ranks alone."""
    is_stub = module_path.parent == HERE and not ON_A_RANK
    return TestNames.from_parent(parent, path=module_path) if is_stub else None


class TestNames(pytest.Module):
    """A file whose tests are collected without an import: all frameworks together take ten seconds.

    The tests have no bodies here, and no names but ``pytest``: give ``parametrize`` literals.
    """

    def _getobj(self) -> ModuleType:
        kept: list[ast.stmt] = []
        for node in ast.parse(self.path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                node.body = [ast.Pass()]
                kept.append(node)
            elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
                kept.append(node)
        tree = ast.fix_missing_locations(ast.Module(kept, []))
        module = ModuleType(self.path.stem)
        vars(module)["pytest"] = pytest
        exec(compile(tree, self.path, "exec", annotations.compiler_flag), vars(module))
        return module


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize a test by driver and launch."""

    def arguments(mark: str) -> list[Any]:
        return [argument for each in metafunc.definition.iter_markers(mark) for argument in each.args]

    own, only, also = arguments("drivers"), arguments("only"), arguments("also")
    on_request = ("one rank", "four ranks", "two levels", "gloo") if own else ("one rank", "Keras 2")
    chosen = []
    for driver in own or LAUNCHES:
        for name, kind in LAUNCHES[driver].items():
            is_asked_for = kind in only or (not only and kind in ("two ranks", *also))
            if (not is_asked_for and (only or kind in on_request)) or _refusal(metafunc.definition, driver, kind) == []:
                continue
            is_slow = (driver, name) in SLOW or not is_asked_for
            marks = [pytest.mark.slow] if is_slow else []
            missing = [package for package in PACKAGES[driver] if find_spec(package) is None]
            if missing:
                marks.append(pytest.mark.skip(reason=f"not installed: {', '.join(missing)}"))
            chosen.append(pytest.param((driver, name), id=f"{driver}-{name}", marks=marks))
    metafunc.parametrize("driver", chosen, indirect=True)


def _refusal(item: Any, driver: str, kind: str) -> list[str] | None:
    """Return the words with which a driver refuses what a test tries: empty if it is not tried, None if promised."""
    for mark in item.iter_markers("excepted"):
        if mark.args[0] == driver and mark.kwargs.get("kind", kind) == kind:
            return mark.kwargs.get("refused", [])
    return None


def _launch_of(item: pytest.Item) -> Launch | None:
    """Return the driver and the launch of a test of this folder that runs in other processes."""
    parameters = getattr(item, "callspec", None) if item.path.is_relative_to(HERE) else None
    found = parameters.params.get("driver") if parameters else None
    is_here = ON_A_RANK or not found or found[0] == "loopback" or item.get_closest_marker("skip")
    return None if is_here else found


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests of a launch together, the longest launches first: two run at a time."""
    launches: dict[Launch | None, list[pytest.Item]] = {}
    for item in items:
        launches.setdefault(_launch_of(item), []).append(item)
    order = sorted(launches, key=lambda one: (one is None, one and one[0] != "tensorflow", -len(launches[one])))
    items[:] = [item for one in order for item in launches[one]]
    for item in items:
        if _launch_of(item):
            item.add_marker(pytest.mark.timeout(SECONDS + 60), append=False)


# -- in the process that was started by the developer ---------------------------------------------

_reports: dict[Launch, tuple[list[Reports], str]] = {}


def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """Report what the ranks say of a test."""
    one = _launch_of(item)
    if one is None:
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in _reports_of(item, one):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _reports_of(item: pytest.Item, one: Launch) -> list[pytest.TestReport]:
    """Return the reports of the first rank whose test failed, or those of rank 0."""
    if one not in _reports:
        _reports[one] = _run_launch(item.session, one)
    ranks, log = _reports[one]
    chosen: list[pytest.TestReport] = []
    for rank, reports in enumerate(ranks):
        found = reports.get(item.nodeid, [])
        if not found or found[-1].when != "teardown":
            text = f"rank {rank} of {one[1]} did not finish this test; the end of the launch's log:\n{log[-6000:]}"
            what = {"keywords": dict.fromkeys(item.keywords, 1), "outcome": "failed", "longrepr": text, "when": "call"}
            found = [pytest.TestReport(item.nodeid, item.location, **what)]  # type: ignore[arg-type]
        if not chosen or any(report.failed for report in found) > any(report.failed for report in chosen):
            chosen = found
            for report in found:
                report.sections.append(("rank", f"{rank} of {world_size_of(one[1])}"))
    return chosen


def _run_launch(session: pytest.Session, one: Launch) -> tuple[list[Reports], str]:
    """Run all tests of the session that belong to a launch; return each rank's reports by test, and the log."""
    driver, kind = one
    with tempfile.TemporaryDirectory(prefix=f"ranks-{driver}-{kind}-") as name:
        folder = Path(name)
        tests = [f"{ROOT}/{item.nodeid}" for item in session.items if _launch_of(item) == one]
        (folder / "tests").write_text("\n".join(tests))
        options = ("--timeout", str(SECONDS_PER_TEST), "--timeout-method", "thread", "--capture", "sys")
        plugins = ("-p", "no:xdist", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", "-p", "no:anyio")
        more = {"DRIVER": driver, REPORTS: name, "HOROVOD_TIMELINE": "DYNAMIC"}  # off until a test starts it
        try:
            log = launch(
                kind, Path("-m"), "pytest", *plugins, *options, f"@{folder / 'tests'}", seconds=SECONDS, **more
            ).stdout
        except pytest.fail.Exception as error:  # what was written before still counts
            log = str(error)
        return [_read(session.config, folder / f"{rank}.jsonl") for rank in range(world_size_of(kind))], log


def _read(config: pytest.Config, file: Path) -> Reports:
    reports: Reports = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        report = config.hook.pytest_report_from_serializable(config=config, data=json.loads(line))
        if report.skipped:
            report.longrepr = tuple(report.longrepr)
        reports.setdefault(report.nodeid, []).append(report)
    return reports


# -- on a rank ------------------------------------------------------------------------------------


class Rank:
    """A plugin that initializes the framework and writes this rank's reports."""

    def __init__(self, config: pytest.Config):
        self.config = config
        self.folder = Path(os.environ[REPORTS])
        self.driver = driver_of(os.environ["DRIVER"], self.folder)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        with (self.folder / f"{self.driver.rank}.jsonl").open("a") as file:
            file.write(json.dumps(data, default=str) + "\n")

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Succeed: a launcher ends all ranks when one fails, and the others may not have reported yet."""
        session.exitstatus = 0


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool:
    """Run a test of the loopback in a thread for each rank, and expect an error where a driver refuses."""
    name, kind = pyfuncitem.callspec.params["driver"]
    refusal = _refusal(pyfuncitem, name, LAUNCHES[name][kind])
    arguments = {each: pyfuncitem.funcargs[each] for each in pyfuncitem._fixtureinfo.argnames}

    def check(driver: Any) -> None:
        run = partial(pyfuncitem.obj, **{**arguments, "driver": driver} if "driver" in arguments else arguments)
        if refusal:
            driver.must_raise(Exception, refusal, run, same=False)
        else:
            run()

    if name == "loopback":
        in_threads(world_size_of(kind), num_nodes_of(kind), pyfuncitem.funcargs["tmp_path"], check)
    else:
        check(pyfuncitem.funcargs["driver"])
    return True


@pytest.fixture
def driver(request: pytest.FixtureRequest) -> Any:
    """The driver on this rank. Each thread of the loopback has its own instead."""
    return request.config.pluginmanager.get_plugin("rank").driver if ON_A_RANK else None


@pytest.fixture(autouse=True)
def in_step(driver: Any, tmp_path: Path) -> Iterator[None]:
    """All ranks meet after each test."""
    yield
    if ON_A_RANK:
        driver.meet()
