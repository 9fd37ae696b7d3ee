"""The documentation: links lead somewhere, examples run, public names are described, pages are short."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue

import nav
import numpy as np
import pytest
import yaml

from hvdcompress.engine.telemetry.ledger import Ledger
from hvdcompress.engine.telemetry.summary import summary
from tests.unit.house.pages import (
    MOST_WORDS,
    ROOT,
    blocks,
    dead_links,
    pages,
    undocumented,
    unusual,
    walls,
    words,
    wrong_names,
)

HEADING = summary((), Ledger(2, 0), 0).splitlines()[0]  # of the table that summary() returns
PUBLIC = (
    "hvdcompress",
    "hvdcompress.loopback",
    "hvdcompress.horovod.torch",
    "hvdcompress.ddp",
    "hvdcompress.fsdp",
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
LAUNCHED = {*(f"{name}.md" for name in (*SCRIPTS.values(), "fsdp")), "advise.md", "reliability.md"}
# Longer pages, each with the reason.
LONG = {
    "fft.md": "a report that `hvdcompress reproduce` writes: a verdict per claim, with its numbers in sentences",
    "gaussiank.md": "likewise",
    "gradiveq.md": "likewise",
    "scalecom.md": "likewise",
    "CHANGELOG.md": "grows with every release",
}
PAGES = [str(page.relative_to(ROOT)) for page in pages()]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    assert not list(dead_links(ROOT / page))


@pytest.mark.parametrize("page", PAGES)
def test_pages_are_short(page: str) -> None:
    file = ROOT / page
    long = file.name in LONG and (file.parent.name == "papers" or file.parent == ROOT)
    assert words(file) <= MOST_WORDS or long


@pytest.mark.parametrize("page", PAGES)
def test_long_tables_are_folded(page: str) -> None:
    assert not list(walls((ROOT / page).read_text()))


@pytest.mark.parametrize("folder", ["docs", "examples", "hvdcompress", "launch", "tools"])
def test_words_are_plain(folder: str) -> None:
    """In pages, and in what help, messages and docstrings are made of."""
    files = [
        file for kind in ("md", "py", "sh", "yaml", "sbatch") for file in sorted((ROOT / folder).rglob(f"*.{kind}"))
    ]
    files += [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    assert not [f"{file.relative_to(ROOT)}, {said}" for file in files for said in unusual(file.read_text())]


@pytest.mark.parametrize("guide", sorted(GUIDES.glob("*.md")), ids=lambda file: file.stem)
def test_a_guide_is_one_page(guide: Path) -> None:
    assert words(guide) <= 600


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_guide_says_what_a_stranger_asks(script: str) -> None:
    """The lines, the whole script, the launch, what to look at, checkpoints, refusals; the diff is the script's."""
    text = (GUIDES / f"{SCRIPTS[script]}.md").read_text()
    example = (ROOT / "examples" / f"{script}.py").read_text()
    for heading in ("What changes", "Launch", "See that it works", "What is saved", "What is refused", "Read on"):
        assert re.search(rf"^## {heading}", text, re.M), heading
    assert example in text and f"examples/{script}.py\n" in text
    ((diff, _),) = blocks(text, "diff")
    assert not list(untrue(diff, example))
    assert "summary()" in text and HEADING in text


def untrue(diff: str, example: str) -> Iterator[str]:
    """Lines of a diff that the changed script has not, and those that it still has."""
    lines = example.splitlines()
    for line in diff.splitlines():
        if line[1:] and (line[1:] in lines) == line.startswith("-"):
            yield line


def test_the_readme_is_two_screens() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 130 and len(text.split()) <= 950


def test_every_page_is_in_the_navigation() -> None:
    there = {str(file.relative_to(ROOT / "docs").with_suffix("")) for file in (ROOT / "docs").rglob("*.md")}
    assert there - nav.every() - nav.PARTS == set()


@pytest.mark.parametrize("part", sorted(nav.PARTS))
def test_a_generated_page_has_its_notes(part: str) -> None:
    notes = (ROOT / "docs" / f"{part}.md").read_text().strip()
    assert notes in (ROOT / "docs" / f"{part.removesuffix('_notes')}.md").read_text()


@pytest.mark.parametrize("page", PAGES)
def test_python_examples_run(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    run_examples(page, (ROOT / page).read_text())


def run_examples(page: str, text: str) -> None:
    """Run a page's blocks one after another, as a reader would paste them."""
    names: dict[str, object] = {"__name__": "example"}
    for code, fragment in blocks(text, "python"):
        assert not list(wrong_names(code))
        if fragment or Path(page).name in LAUNCHED or "@method" in code:  # a method must be in a file: examples/
            compile(code, page, "exec")
        else:
            exec(compile(code, page, "exec"), names)


@pytest.mark.parametrize("page", PAGES)
def test_plans_load(page: str) -> None:
    import hvdcompress

    for text, fragment in blocks((ROOT / page).read_text(), "yaml"):
        if not fragment and "method" in (given := yaml.safe_load(text)):
            hvdcompress.load(given)


def test_the_method_of_ones_own_passes_the_suite() -> None:
    """examples/roundrobin.py, the worked example of "Write your own method"."""
    from roundrobin import RoundRobin

    from hvdcompress.testing import check_method

    check_method(RoundRobin(pieces=3), worlds=(1, 2, 3), sizes=(1, 50))


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


class TestTheChecksNotice:
    """Each check on a page that is wrong."""

    @pytest.fixture
    def page(self, tmp_path: Path) -> Path:
        file = tmp_path / "page.md"
        file.write_text("# A page\n\n## Part one\n")
        return file

    @pytest.mark.parametrize("target", ["gone.md", "#part-two", "page.md#part-two"])
    def test_a_dead_link(self, page: Path, target: str) -> None:
        page.write_text(f"{page.read_text()}[x]({target})\n")
        assert len(list(dead_links(page))) == 1
        page.write_text(page.read_text().replace(target, "page.md#part-one"))
        assert not list(dead_links(page))

    def test_a_long_page(self, page: Path) -> None:
        page.write_text("word " * (MOST_WORDS + 1))
        assert words(page) > MOST_WORDS
        page.write_text("<details>\n" + "word " * (MOST_WORDS + 1) + "\n</details>\n\n| " + "word " * 99 + "|\n")
        assert words(page) == 0

    @pytest.mark.parametrize(
        "line",
        ["42 ms foretold", "fp16 beside dense", "the tensor goes dense", "hosts cannot be had", "is drawn anew",
         "what the paper makes of it", "a dear copy", "it stands in the file", "warm-up comes on at step 5",
         "Limits, honestly", "the compression rate", "seconds an exchange", "300 B a step"],
    )  # fmt: skip
    def test_an_unusual_word(self, line: str) -> None:
        assert len(list(unusual(f"plain\n{line}\n"))) == 1
        assert not list(
            unusual("A link's rate, once per step; from hvdcompress.integrations import beside\nbeside.save()")
        )

    def test_a_wall_of_numbers(self) -> None:
        table = "| a | b |\n|---|---|\n" + "| 1 ms | −2.5 |\n" * 80
        assert list(walls(table)) == ["160 figures: | a | b |"]
        assert not list(walls(f"<details>\n\n{table}\n</details>\n| a |\n|---|\n" + "| word |\n" * 200))

    @pytest.mark.parametrize("diff", ["+b = 2", "-a = 1", " b = 2", "+ a = 1"])
    def test_a_diff_that_is_not_the_scripts(self, diff: str) -> None:
        assert list(untrue(f"+a = 1\n-b = 2\n{diff}", "a = 1\n")) == [diff]

    @pytest.mark.parametrize(
        "code", ["from hvdcompress.horovod.torch import Compresor", "from hvdcompress.pytorch import x"]
    )
    def test_a_wrong_import(self, code: str) -> None:
        assert len(list(wrong_names(code))) == 1
        assert not list(wrong_names("from hvdcompress.horovod.torch import Compressor\nfrom hvdcompress import ddp"))

    def test_an_example_that_fails(self) -> None:
        text = "```python\nx = 1\n```\n\nthen\n```python\nassert x == 2\n```\n"
        with pytest.raises(AssertionError):
            run_examples("page.md", text)
        run_examples("page.md", text.replace("then", "<!-- a fragment: of a longer one -->"))
        with pytest.raises(SyntaxError):
            run_examples("page.md", text.replace("then", "<!-- a fragment: -->").replace("assert x", "assert x x"))

    def test_a_plan_with_a_wrong_key(self) -> None:
        import hvdcompress

        ((text, _),) = blocks("```yaml\nmethod: topk\ndensitty: 0.1\n```\n", "yaml")
        with pytest.raises(ValueError, match="densitty"):
            hvdcompress.load(yaml.safe_load(text))

    def test_an_undocumented_name(self) -> None:
        reference = (ROOT / "docs" / "reference.md").read_text()
        without = reference.replace(".. autoclass:: hvdcompress.method.Slot\n   :members:\n", "")
        assert list(undocumented(PUBLIC, without)) == ["docs/reference.md lacks hvdcompress.method.Slot"]

    def test_a_name_without_a_docstring(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = tmp_path / "hvdcompress"
        folder.mkdir()
        (folder / "__init__.py").write_text('from hvdcompress.inner import bare\n__all__ = ["bare"]\n')
        (folder / "inner.py").write_text("def bare():\n    return 1\n")
        monkeypatch.setattr("tests.unit.house.pages.ROOT", tmp_path)
        assert list(undocumented(["hvdcompress"], "hvdcompress.bare")) == ["hvdcompress.bare has no docstring"]
