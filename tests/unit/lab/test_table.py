"""Tables and files of JSON lines: every form of a table says the same; half of a line is never read."""

from __future__ import annotations

import csv
import doctest
import io
import json

import pytest
from rich.console import Console

from hvdcompress.lab.output import jsonl, table
from hvdcompress.lab.output.table import MISSING, Column, Table

COLUMNS = [
    Column("name", "method", lambda row: row["name"], align="left"),
    Column("sent", "sent", lambda row: f"{row['sent'] / 1000:.0f} kB", lambda row: row["sent"], "B"),
    Column("wide", "what is left out first", lambda row: "w" * 30, yields=2),
    Column("less", "and then this", lambda row: "l" * 20, yields=1),
    Column("none", "nothing", lambda row: MISSING),
    Column("rate", "rate", lambda row: "?", lambda row: row["rate"], marked=lambda row: row["rate"] < 1),
]
ROWS = [{"name": "top|k*", "sent": 5000, "rate": 2.5}, {"name": "<b>[red]", "sent": 70, "rate": float("nan")}]
TABLE = Table(COLUMNS, ROWS, "a title", lambda row: "failed" if row["sent"] < 100 else "", lambda row: 10)


def shown(width):
    console = Console(width=width, record=True, file=io.StringIO())
    left_out = TABLE.show(console)
    return console.export_text(), left_out


def test_doctest():
    failed, tried = doctest.testmod(table)
    assert tried and not failed


@pytest.mark.parametrize(("width", "titles"), [(200, 6), (70, 5), (50, 4)])
def test_columns_give_way(width, titles):
    text, left_out = shown(width)
    assert left_out == (titles < 6) and max(map(len, text.splitlines())) <= width
    heads = text.splitlines()[1]
    assert sum(column.title in heads for column in COLUMNS) == titles and text.startswith("a title")
    assert "<b>[red]" in text, "markup of rich in a cell is text"


def test_markdown():
    lines = TABLE.markdown().splitlines()
    assert lines[1] == "|---|---:|---:|---:|---:|---:|" and lines[2].startswith("| top\\|k\\* | 5 kB |")


def test_html():
    text = TABLE.html()
    assert "&lt;b&gt;[red]" in text and text.count("<tr") == 3 and text.count('class="failed"') == 1
    assert "var(--c1)" in text, "colours begin again after the last one"
    assert '<td class="sent">5 kB</td>' in text


def test_csv_and_json_have_values():
    rows = list(csv.reader(io.StringIO(TABLE.csv())))
    assert rows[0][:2] == ["method", "sent [B]"] and rows[1][1:2] == ["5000"]
    assert rows[1][4] == "" and rows[1][5] == "2.5" and rows[2][5] == "", "what is missing is empty"
    data = json.loads(TABLE.json(), parse_constant=lambda word: pytest.fail(word))
    assert data["units"] == {"sent": "B"} and data["title"] == "a title"
    assert data["rows"][1]["rate"] is None and data["rows"][0]["none"] is None and data["rows"][0]["sent"] == 5000


def test_columns_without_figures_can_be_dropped():
    assert [column.key for column in TABLE.filled().columns] == ["name", "sent", "wide", "less", "rate"]


def test_printing_needs_a_known_format():
    console = Console(width=200, record=True, file=io.StringIO())
    with pytest.raises(ValueError, match="unknown format 'xml'; known: text, markdown, csv, json"):
        TABLE.print(console, "xml")
    TABLE.print(console, "csv")
    assert console.export_text() == TABLE.csv()


# -- JSON lines ------------------------------------------------------------------------------------


def test_lines_that_were_cut_off_are_skipped(tmp_path):
    file = tmp_path / "x.jsonl"
    assert jsonl.read(file) == []
    jsonl.append(file, {"n": 1})
    with file.open("ab") as stream:
        stream.write('{"n": "é'.encode()[:-1])  # in the middle of a character, even
    assert jsonl.read(file) == [{"n": 1}]
    jsonl.end_line(file)
    jsonl.end_line(file)
    jsonl.append(file, {"n": 2})
    assert jsonl.read(file) == [{"n": 1}, {"n": 2}] and file.read_bytes().count(b"\n") == 3


def test_a_follower_waits_for_the_end_of_a_line(tmp_path):
    file = tmp_path / "x.jsonl"
    follow = jsonl.Follower(file)
    assert list(follow()) == []
    file.write_text('{"n": 1}\n{"n"')
    assert list(follow()) == [{"n": 1}] and list(follow()) == []
    with file.open("a") as stream:
        stream.write(": 2}\n")
    assert list(follow()) == [{"n": 2}]
    file.write_text(file.read_text() + '{"n": 3}')
    assert list(follow()) == [] and jsonl.read(file)[-1] == {"n": 3}, "a last line may lack its line break"
