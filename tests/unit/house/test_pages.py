"""The documentation: links lead somewhere, examples run, public names are described, generated pages are current."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import pkgutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue

import nav
import peers
import pytest
import yaml

import hvdcompress
from hvdcompress.loopback import Loopback
from hvdcompress.method import TensorSpec
from hvdcompress.plan import plan_of
from hvdcompress.testing import check_method, numbers
from tests import ROOT
from tests.installed import needs
from tests.unit.house.pages import blocks, dead_links, imports_of_diffs, links, pages, undocumented, wrong_names

PUBLIC = (
    "hvdcompress",
    "hvdcompress.loopback",
    "hvdcompress.horovod.torch",
    "hvdcompress.ddp",
    "hvdcompress.fsdp",
    "hvdcompress.local_steps",
    "hvdcompress.horovod.tensorflow",
    "hvdcompress.horovod.keras",
    "hvdcompress.mpi",
    "hvdcompress.method",
    "hvdcompress.testing",
)
#: the guide that shows each script of examples/
SCRIPTS = {
    "accelerate_compressed": "accelerate",
    "ddp_compressed": "ddp",
    "keras_compressed": "keras",
    "lightning_compressed": "lightning",
    "mpi_numpy": "mpi",
    "tensorflow_compressed": "tensorflow",
    "torch_compressed": "pytorch",
    "transformers_compressed": "transformers",
}
NEEDS_TORCH = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch")
GUIDES = ROOT / "docs" / "guides"
#: pages whose examples need a launch of several ranks and a framework: tests/ranks and tests/launched run them
LAUNCHED = {f"{name}.md" for name in (*SCRIPTS.values(), "fsdp", "nodes", "local-steps", "advise", "reliability")}
PAGES = [str(page.relative_to(ROOT)) for page in pages()]
DOCTESTS = [
    *(f"hvdcompress.methods.{info.name}" for info in pkgutil.iter_modules([str(ROOT / "hvdcompress" / "methods")])),
    *(
        pytest.param(f"experiments.{name}", marks=NEEDS_TORCH)
        for name in ("momentum.contenders", "papers.simulate", "to_accuracy.races")
    ),
    "experiments.papers.claims",
    "experiments.papers.command",
    "hvdcompress.loopback",
    "hvdcompress.registry",
    "hvdcompress.testing",
]


def test_links_lead_somewhere() -> None:
    assert not [link for page in pages() for link in dead_links(page)]


def test_readme_can_be_shown_outside_of_the_repository() -> None:
    """A package index shows README: it has no files to link to, and shows no SVG."""
    targets = links(ROOT / "README.md")
    assert targets and not [target for target in targets if not target.startswith("https://")]
    assert not [target for target in targets if target.endswith(".svg")]


def test_settings_that_editors_complete_are_those_of_the_methods_and_plans() -> None:
    assert subprocess.run([sys.executable, "docs/settings.py", "--check"], cwd=ROOT).returncode == 0


def test_every_page_is_in_the_navigation() -> None:
    docs = [page.relative_to(ROOT / "docs").with_suffix("") for page in pages() if ROOT / "docs" in page.parents]
    assert not [str(page) for page in docs if not nav.listed(str(page))]


def test_public_names_are_documented() -> None:
    assert not list(undocumented(PUBLIC, (ROOT / "docs" / "reference.md").read_text()))


def test_generated_pages_are_up_to_date() -> None:
    needs("torch")  # to_accuracy names PyTorch's hooks
    line = [sys.executable, "docs/build.py", "--check"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(200)
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    python = ROOT / "build" / "docs-venv" / "bin" / "python"  # launch/docs.sh makes it
    if all(map(importlib.util.find_spec, ("sphinx", "furo", "myst_parser", "sphinx_design", "sphinx_copybutton"))):
        python = Path(sys.executable)
    if not python.exists():
        pytest.skip("no Sphinx: launch/docs.sh installs it (docs/requirements.txt), in about a minute")
    line = [python, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "docs", tmp_path]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


# -- examples --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DOCTESTS)
def test_doctests(name: str) -> None:
    failed, tried = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert tried and not failed


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_guide_shows_the_changes_in_its_script(script: str) -> None:
    text = (GUIDES / f"{SCRIPTS[script]}.md").read_text()
    lines = (ROOT / "examples" / f"{script}.py").read_text().splitlines()
    ((diff, _),) = blocks(text, "diff")
    assert f"(../../examples/{script}.py)" in text
    assert not [line for line in diff.splitlines() if line[1:] and (line[1:] in lines) == line.startswith("-")]


@pytest.mark.parametrize("page", PAGES)
def test_python_examples_run(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a page's blocks one after another, as a reader would paste them."""
    monkeypatch.chdir(ROOT)
    names: dict[str, object] = {"__name__": "example"}
    text = (ROOT / page).read_text()
    assert not [name for line in imports_of_diffs(text) for name in wrong_names(line)]
    for code, fragment in blocks(text, "python"):
        assert not list(wrong_names(code))
        program = compile(code, page, "exec", dont_inherit=True)  # without this file's __future__
        if not fragment and Path(page).name not in LAUNCHED:
            exec(program, names)


@pytest.mark.parametrize("script", ["accelerate_compressed", "lightning_compressed", "transformers_compressed"])
def test_an_example_runs_the_block_of_its_guide(script: str) -> None:
    """tests/launched/test_integrations.py runs the examples."""
    example = (ROOT / "examples" / f"{script}.py").read_text()
    ((code, _),) = blocks((GUIDES / f"{SCRIPTS[script]}.md").read_text(), "python")
    compressor = code.removeprefix("print(").partition(".summary()")[0]
    assert compressor in example and "compressor.summary()" in example


def test_a_page_shows_lines_of_an_example() -> None:
    text = (GUIDES / "new-driver.md").read_text()
    example = (ROOT / "examples" / "threads_driver.py").read_text().splitlines()
    (begin, _), (code, _) = blocks(text, "python")
    assert not [line for line in begin.splitlines() if line not in example]
    assert not [line for line in code.splitlines() if line and f"    {line}" not in example]
    ((code, _), *_) = blocks((GUIDES / "new-method.md").read_text(), "python")
    example = (ROOT / "examples" / "roundrobin.py").read_text().splitlines()
    assert not [line for line in code.splitlines() if line not in example]


def test_plans_of_pages_load() -> None:
    for page in pages():
        for text, fragment in blocks(page.read_text(), "yaml"):
            if not fragment and "method" in (given := yaml.safe_load(text)):
                hvdcompress.load_plan(given)


def test_the_plan_of_the_guide_does_what_it_says() -> None:
    ((block, _),) = blocks((GUIDES / "plans.md").read_text(), "yaml")
    plan = hvdcompress.load_plan(yaml.safe_load(block))
    assert plan.program_of(TensorSpec("conv1.weight", (64, 3, 7, 7))).main.id == "none"
    conv = plan.program_of(TensorSpec("layer2.conv.weight", (64, 64, 3, 3)))
    assert (conv.at(0).id, conv.at(5 * 391).id, conv.main.density) == ("none", "scalecom", 0.0025)


def test_the_method_of_the_guide_passes_the_conformance_suite() -> None:
    """examples/roundrobin.py, the example of "Write your own method"."""
    from roundrobin import RoundRobin

    check_method(RoundRobin(pieces=3), world_sizes=(1, 2, 3), sizes=(1, 50))


def test_the_driver_of_the_guide_equals_the_loopback() -> None:
    """examples/threads_driver.py, the example of "Write a driver"."""
    from threads_driver import Compressor, QueueTransport

    settings = {"density": 0.1, "min_elements": 10, "optimizer_momentum": "keep"}
    shapes = {"a": (60,), "b": (7,)}
    steps = [[{n: numbers(s, rank, step) for n, s in shapes.items()} for rank in range(3)] for step in range(4)]
    net = Loopback("topk", 3, **settings)
    wanted = [net.allreduce(given) for given in steps]
    mailboxes: list[Queue] = [Queue() for _ in range(3)]

    def program(rank: int) -> None:
        comp = Compressor("topk", QueueTransport(rank, mailboxes), **settings)
        for given, want in zip(steps, wanted, strict=True):
            comp.average(given[rank])
            assert all((given[rank][name] == want[rank][name]).all() for name in shapes)
        assert comp.state_dict()["steps"] == {"a": 4, "b": 4}

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(program, range(3)))


# -- the page that compares other libraries ----------------------------------------------------------


def test_each_method_of_another_library_has_a_plan_or_a_reason() -> None:
    for library in peers.peers():
        for row in library["methods"]:
            assert len(row.keys() & {"plan", "python", "missing"}) == 1 and row["theirs"] and row["file"]
            if "plan" in row:
                plan_of(row["plan"])
            if "python" in row:
                module, _, name = row["python"].rpartition(".")
                assert callable(getattr(importlib.import_module(module), name))
