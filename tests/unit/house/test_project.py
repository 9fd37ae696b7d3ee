"""Project files: workflows use pinned actions, and the page of decisions lists the licences of what the wheel needs."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import hvdcompress
from tests import ROOT
from tests.unit.house.pages import PROJECT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_by_commit(path: Path) -> None:
    jobs = yaml.safe_load(path.read_text())["jobs"].values()
    used = [step["uses"] for job in jobs for step in job.get("steps", ()) if "uses" in step]
    assert used and not [action for action in used if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", action)]


def test_forms_and_files_of_github_are_yaml() -> None:
    for path in [*(ROOT / ".github").rglob("*.yml"), ROOT / ".pre-commit-config.yaml"]:
        assert isinstance(yaml.safe_load(path.read_text()), dict), path
    for path in (ROOT / ".github").rglob("*.*"):
        ours = re.findall(r"https://github\.com/[\w-]+/[\w-]+(?=/(?:blob|security))", path.read_text())
        assert set(ours) <= {PROJECT["urls"]["Repository"]}, path


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (hvdcompress.__version__, PROJECT["license"])
    assert citation["repository-code"] == PROJECT["urls"]["Repository"]


def needed_packages() -> set[str]:
    """Return the names of the packages that installing the wheel brings along, as far as they are installed."""
    found: set[str] = set()
    queue = list(PROJECT["dependencies"])
    while queue:
        requirement = Requirement(queue.pop())
        name = canonicalize_name(requirement.name)
        if name in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        found.add(name)
        queue += distribution(name).requires or []
    return found


def licence_of(name: str) -> str:
    """Return what a package's metadata says about its licence."""
    metadata = distribution(name).metadata
    classifiers = [one for one in metadata.get_all("Classifier", []) if one.startswith("License ::")]
    return " ".join([metadata.get("License-Expression", ""), metadata.get("License", ""), *classifiers])


def test_the_licences_of_what_the_wheel_needs() -> None:
    page = (ROOT / "docs" / "decisions.md").read_text().partition("| licence | packages |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| ([\w.-]+) \| (.*) \|$", page, re.MULTILINE)
    listed = {canonicalize_name(name): licence for licence, names in rows for name in names.split(", ")}
    assert not needed_packages() - listed.keys(), "docs/decisions.md lacks the licence of a package"
    for name, licence in listed.items():
        try:
            said = licence_of(name)
        except PackageNotFoundError:  # an older version of another package does not need it
            continue
        assert licence.partition("-")[0] in said, f"{name}: docs/decisions.md says {licence}; its metadata: {said}"
