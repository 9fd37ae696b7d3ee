"""Tables and files of JSON lines: every form of a table says the same; half of a line is never read."""

from __future__ import annotations

import csv
import doctest
import io
import json

import pytest

from experiments.output import jsonl, table
from experiments.output.table import MISSING, Column, Table

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


def test_doctest():
    failed, tried = doctest.testmod(table)
    assert tried and not failed


def test_csv_and_json_have_values():
    rows = list(csv.reader(io.StringIO(TABLE.csv())))
    assert rows[0][:2] == ["method", "sent [B]"] and rows[1][1:2] == ["5000"]
    assert rows[1][4] == "" and rows[1][5] == "2.5" and rows[2][5] == "", "what is missing is empty"
    data = json.loads(TABLE.json(), parse_constant=lambda word: pytest.fail(word))
    assert data["units"] == {"sent": "B"} and data["title"] == "a title"
    assert data["rows"][1]["rate"] is None and data["rows"][0]["none"] is None and data["rows"][0]["sent"] == 5000


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
