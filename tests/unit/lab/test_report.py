"""The report: figures are those of the events, and tables and page are made of partial runs too."""

from __future__ import annotations

import io
import json
import re
from html.parser import HTMLParser

import pytest
from rich.console import Console

from hvdcompress.lab.output import numbers
from hvdcompress.lab.training import files, report, results
from hvdcompress.lab.training.experiment import Experiment

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


def test_what_did_not_finish_is_said(folder):
    found = results.read([folder])
    assert rows(found)["fp16"].remark == "1 of 2 failed, 1 of 2 interrupted at step 40"
    assert rows(found)["bf16"].remark == "2 of 2 not started"
    assert rows(found)["none"].remark == ""
    assert "digits, fp16: ValueError: no" in found.notes
    assert rows(found)["fp16"].mean["rate"] == 2  # what is known of an unfinished run
    assert "value" not in rows(found)["fp16"].mean


def test_the_notes_are_honest_about_times(folder):
    note = results.read([folder]).notes[0]
    assert "2 ranks on one machine" in note and "shared memory" in note and "times do not" in note


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


def test_nothing_but_a_config_makes_a_report(folder):
    pytest.importorskip("matplotlib")
    for file in (folder / "metrics").iterdir():
        file.unlink()
    assert len(files.write(results.read([folder]), folder)) == 3


def test_runs_are_compared(folder, tmp_path):
    found = results.read([folder, folder])
    assert len(found.rows) == 8 and found.rows[0].method == "made/none"
    assert found.name == "made vs made"
    with pytest.raises(ValueError, match="nowhere holds no run"):
        results.read([tmp_path / "nowhere"])


@pytest.mark.parametrize("width", [70, 80, 100, 160])
def test_the_table_fits_the_terminal(folder, width):
    console = Console(width=width, record=True, file=io.StringIO())
    found = results.read([folder])
    for row in found.rows:
        row.results = [result for result in row.results if result.seed == 0]
    found.rows = [row for row in found.rows if not row.remark]
    report.show(found, console)
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text and "100x" in text and "97.50" in text


@pytest.mark.parametrize(
    ("form", "value", "text"),
    [
        (numbers.num_bytes, 0, "0 B"),
        (numbers.num_bytes, 999.4, "999 B"),
        (numbers.num_bytes, 999.6, "1.00 kB"),
        (numbers.num_bytes, 5123, "5.12 kB"),
        (numbers.num_bytes, 999_700, "1.00 MB"),
        (numbers.num_bytes, 2.5e15, "2500 TB"),
        (numbers.seconds_of, 0.0123, "12.3 ms"),
        (numbers.seconds_of, 1.0, "1.00 s"),
        (numbers.seconds_of, 0.99999, "1.00 s"),
        (numbers.seconds_of, 3e-6, "3.00 µs"),
        (numbers.seconds_of, 0.0, "0.00 µs"),
        (numbers.rate_of, 0.99996, "1.00x"),
        (numbers.rate_of, 112.7, "113x"),
        (numbers.rate_of, float("nan"), "–"),
        (numbers.number, -0.01234, "-0.0123"),
        (numbers.clock, 754, "12:34"),
        (numbers.percent, 0.005, "0.5 %"),
    ],
)
def test_units(form, value, text):
    assert form(value) == text


def test_a_framework_that_cannot_tell_waiting_from_computing_leaves_it_open(folder):
    (folder / "config.yaml").write_text("framework: tensorflow\n" + CONFIG, encoding="utf-8")
    for file in (folder / "metrics").iterdir():
        text = file.read_text(encoding="utf-8").replace("[0.001, 0.001]", "[NaN, NaN]")
        file.write_text(text.replace('"3.11"', '"3.11", "tensorflow": "2.21.0"'), encoding="utf-8")
    found = results.read([folder])
    assert any("TensorFlow 2.21.0" in note and "left open" in note for note in found.notes)
    written = files.write(found, folder)
    [row] = [line for line in written[1].read_text(encoding="utf-8").splitlines() if line.startswith("| few ")]
    assert row.count("| – ") == 2, row  # communicate, and what then is the rest
    assert "NaN" not in written[0].read_text(encoding="utf-8")
