"""The documentation: links lead somewhere, examples run, public names are described."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue

import nav
import numpy as np
import pytest
import yaml

from hvdcompress.method import REGISTERED
from tests.unit.house.pages import (
    ROOT,
    blocks,
    dead_links,
    pages,
    undocumented,
    wrong_names,
)

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
# The guides that show a script of examples/, by the script's name.
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
GUIDES = ROOT / "docs" / "guides"
# Pages whose examples need a launch of several ranks and a framework; the scripts in examples/ that they show are run.
LAUNCHED = {
    *(f"{name}.md" for name in (*SCRIPTS.values(), "fsdp", "nodes", "local-steps")),
    "advise.md",
    "reliability.md",
}
PAGES = [str(page.relative_to(ROOT)) for page in pages()]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    assert not list(dead_links(ROOT / page))


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_guide_shows_what_changes_in_its_script(script: str) -> None:
    text = (GUIDES / f"{SCRIPTS[script]}.md").read_text()
    assert f"(../../examples/{script}.py)" in text
    ((diff, _),) = blocks(text, "diff")
    assert not list(untrue(diff, (ROOT / "examples" / f"{script}.py").read_text()))


def untrue(diff: str, example: str) -> Iterator[str]:
    """Lines of a diff that the changed script has not, and those that it still has."""
    lines = example.splitlines()
    for line in diff.splitlines():
        if line[1:] and (line[1:] in lines) == line.startswith("-"):
            yield line


def test_every_page_is_in_the_navigation() -> None:
    there = {str(page.relative_to(ROOT / "docs").with_suffix("")) for page in pages() if ROOT / "docs" in page.parents}
    assert {page for page in there if not nav.listed(page)} == set()


@pytest.mark.parametrize("page", PAGES)
def test_python_examples_run(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    run_examples(page, (ROOT / page).read_text())


def run_examples(page: str, text: str) -> None:
    """Run a page's blocks one after another, as a reader would paste them."""
    names: dict[str, object] = {"__name__": "example"}
    known = dict(REGISTERED)
    try:
        for code, fragment in blocks(text, "python"):
            assert not list(wrong_names(code))
            if fragment or Path(page).name in LAUNCHED:
                compile(code, page, "exec")
            else:
                exec(compile(code, page, "exec", dont_inherit=True), names)  # without this file's __future__
    finally:  # forget the methods that the page defines, but not those of modules that it imports
        imported = {id: cls for id, cls in REGISTERED.items() if cls.__module__ != "example"}
        REGISTERED.clear()
        REGISTERED.update(imported | known)


@pytest.mark.parametrize("page", PAGES)
def test_plans_load(page: str) -> None:
    import hvdcompress

    for text, fragment in blocks((ROOT / page).read_text(), "yaml"):
        if not fragment and "method" in (given := yaml.safe_load(text)):
            hvdcompress.load(given)


def test_the_plan_example_loads(tmp_path: Path) -> None:
    import hvdcompress
    from hvdcompress.method import TensorSpec

    ((block, _),) = blocks((GUIDES / "plans.md").read_text(), "yaml")
    (tmp_path / "plan.yaml").write_text(block)
    plan = hvdcompress.load(tmp_path / "plan.yaml")
    assert plan.program_of(TensorSpec("conv1.weight", (64, 3, 7, 7))).main.id == "none"
    conv = plan.program_of(TensorSpec("layer2.conv.weight", (64, 64, 3, 3)))
    assert (conv.at(0).id, conv.at(5 * 391).id, conv.main.density) == ("none", "scalecom", 0.0025)


def test_the_method_of_ones_own_passes_the_suite() -> None:
    """examples/roundrobin.py, the worked example of "Write your own method"."""
    from roundrobin import RoundRobin

    from hvdcompress.testing import check_method

    check_method(RoundRobin(pieces=3), world_sizes=(1, 2, 3), sizes=(1, 50))


def test_the_driver_of_ones_own_gives_what_loopback_gives() -> None:
    """examples/threads_driver.py, the worked example of "Write a driver"."""
    from threads_driver import Compressor, QueueTransport

    from hvdcompress.loopback import Loopback

    settings = {"density": 0.1, "min_elements": 10, "optimizer_momentum": "keep"}
    steps = [
        [{name: np.random.default_rng([step, r]).normal(size=n).astype("f") for name, n in (("a", 60), ("b", 7))}
         for r in range(3)]
        for step in range(4)
    ]  # fmt: skip
    net = Loopback("topk", 3, **settings)
    wanted = [net.allreduce_many(given) for given in steps]
    mailboxes: list[Queue] = [Queue() for _ in range(3)]

    def program(rank: int) -> None:
        comp = Compressor("topk", QueueTransport(rank, mailboxes), **settings)
        for given in steps:
            comp.average(given[rank])
        assert comp.ledger.steps == 4 and comp.state_dict()["steps"] == {"a": 4, "b": 4}

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(program, range(3)))
    for given, want in zip(steps, wanted, strict=True):
        for one, other in zip(given, want, strict=True):
            assert all((one[name] == other[name]).all() for name in one)


def test_public_names_are_documented() -> None:
    assert not list(undocumented(PUBLIC, (ROOT / "docs" / "reference.md").read_text()))
