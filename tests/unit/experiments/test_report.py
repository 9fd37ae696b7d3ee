"""The report: figures are those of the events, and tables and page are made of partial runs too."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest

from experiments.training import files, results
from experiments.training.experiment import Experiment

CONFIG = """\
name: made
seeds: [0, 1]
tasks: [{task: digits, steps: 100}]
methods: [none, {method: topk, label: few, density: 0.01}, fp16, bf16]
"""
METRIC = {"name": "held-out accuracy", "unit": "%", "higher_is_better": True}


def events(run, value, sent, steps=100, end="finished"):
    start = {
        "event": "start", "run": run.id, "spec": run.spec(), "density": run.method.density, "parameters": 1000,
        "versions": {"python": "3.11"},
    }  # fmt: skip
    curve = [
        {"event": "step", "step": s, "loss": 2 / s, "lr": 0.1, "bytes_sent": sent * s, "dense_bytes": 4000 * s,
         "seconds": s / 100}
        for s in range(10, steps + 1, 10)
    ]  # fmt: skip
    finished = {
        "event": "finished", "steps": steps, "metric": {**METRIC, "value": value}, "seconds": 1.0, "counters": {},
        "ranks": {
            "bytes_sent": [sent * steps, 3 * sent * steps],  # ranks may send different amounts
            "bytes_on_wire": [2 * sent * steps] * 2,
            "dense_bytes": [4000 * steps] * 2,
            "total_seconds": [0.010, 0.012],
            "select_seconds": [0.002, 0.004],
            "communicate_seconds": [0.001, 0.001],
        },
    }  # fmt: skip
    ends = {"finished": [finished], "failed": [{"event": "failed", "error": "ValueError: no", "traceback": ""}]}
    return [start, *curve, *ends.get(end, [])]


@pytest.fixture
def folder(tmp_path):
    """Two seeds of none and few are finished, fp16 has failed once and was interrupted once, bf16 never began."""
    folder = tmp_path / "made"
    (folder / "metrics").mkdir(parents=True)
    (folder / "config.yaml").write_text(CONFIG, encoding="utf-8")
    launch = {"command": "horovodrun -np 2 --mpi python x.py", "commit": "abc", "dirty": True, "machine": {"cores": 2}}
    (folder / "launch.json").write_text(json.dumps(launch), encoding="utf-8")
    for run in Experiment.open(folder / "config.yaml").runs():
        value, sent = {"none": (98.0 + run.seed, 4000), "few": (97.5, 20)}.get(run.method.label, (0, 2000))
        end = "finished"
        if run.method.label == "fp16":
            end = ("failed", "interrupted")[run.seed]
        if run.method.label == "bf16":
            continue
        steps = 100 if end == "finished" else 40
        lines = [json.dumps(event) for event in events(run, value, sent, steps, end)]
        tail = '{"event": "step", "st' if end == "interrupted" else ""  # killed in the middle of a line
        (folder / "metrics" / f"{run.id}.jsonl").write_text("\n".join(lines) + "\n" + tail, encoding="utf-8")
    return folder


def rows(found):
    return {row.method: row for row in found.rows}


def test_figures_are_those_of_the_events(folder):
    few = rows(results.read([folder]))["few"]
    assert few.mean["sent"] == 40 and few.mean["on_wire"] == 40  # the mean of both ranks
    assert few.mean["rate"] == 4000 / 40
    assert few.mean["total"] == pytest.approx(0.011)
    assert few.mean["select"] + few.mean["communicate"] + few.mean["rest"] == pytest.approx(few.mean["total"])
    assert few.mean["loss"] == pytest.approx(0.02)
    assert few.mean["value"] == 97.5 and few.std["value"] == 0


def test_differences_are_taken_seed_by_seed(folder):
    few = rows(results.read([folder]))["few"]
    assert few.mean["difference"] == pytest.approx(-1.0)  # -0.5 and -1.5
    assert few.std["difference"] == pytest.approx(2**-0.5)
    assert "difference" not in rows(results.read([folder]))["none"].mean


def test_written_files(folder):
    pytest.importorskip("matplotlib")
    written = files.write(results.read([folder]), folder)
    assert [file.name for file in written] == ["summary.json", "table.md", "report.html"]
    summary = json.loads(written[0].read_text(encoding="utf-8"), parse_constant=lambda word: pytest.fail(word))
    few = next(row for row in summary["rows"] if row["method"] == "few")
    assert few["mean"]["rate"] == 100 and len(few["runs"]) == 2
    table = written[1].read_text(encoding="utf-8")
    assert re.search(r"^\| few \| 1 % \| 100x \| 40 B \| .* \| −1\.00 ± 0\.71 \|$", table, re.MULTILINE)
    head = next(line for line in table.splitlines() if line.startswith("| method"))
    assert all(line.count("|") == head.count("|") for line in table.splitlines() if line.startswith("|"))


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.ids, self.uses, self.words, self.outside = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        for key, value in attrs:
            if key == "id":
                self.ids.append(value)
            if key in ("src", "href", "xlink:href"):
                (self.uses if value.startswith("#") else self.outside).append(value.removeprefix("#"))
            self.uses += re.findall(r"url\(#([^)]+)\)", value or "")

    def handle_data(self, data):
        self.words.append(data)


def test_the_page_needs_nothing_else(folder):
    pytest.importorskip("matplotlib")
    text = files.write(results.read([folder]), folder)[2].read_text(encoding="utf-8")
    page = Page(text)
    assert text.count("<svg role=") == 4 and text.count("aria-label=") > 4
    assert not page.outside and "@import" not in text and "<script" not in text
    assert len(page.ids) == len(set(page.ids)), "ids of two plots clash"
    assert set(page.uses) <= set(page.ids)
    assert not re.search(r"#0[1-5]0[0-9a-f]{3}", text), "a place-holder of a colour was left"
    for word in ("few", "held-out accuracy", "abc (with changes)", "ValueError: no"):
        assert any(word in part for part in page.words)


def test_the_page_escapes_what_users_wrote(folder):
    pytest.importorskip("matplotlib")
    found = results.read([folder])
    for row in found.rows:
        row.method = row.method.replace("few", "<script>a & b|c</script>")
    text = files.write(found, folder)[2].read_text(encoding="utf-8")
    assert "<script" not in text and "&lt;script&gt;" in text
    assert r"b\|c" in (folder / "table.md").read_text(encoding="utf-8")
