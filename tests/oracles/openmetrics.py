"""A small grammar of OpenMetrics text, for tests: what Compressors write, and no more.

From section 4 of the specification (version 1.0.0, https://prometheus.io/docs/specs/om/open_metrics_spec/): the ABNF of
lines, one block for each metric family with its metadata first, ``_total`` after a counter's name, a unit that ends the
family's name, no sample twice, and ``# EOF`` as the last line.
"""

from __future__ import annotations

import re

NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
ESCAPED = r'(?:[^"\\\n]|\\[n"\\])*'
META = re.compile(rf"# (TYPE|UNIT|HELP) ({NAME}) (.*)")
SAMPLE = re.compile(rf"({NAME})\{{(.*)\}} ([-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|Inf)|NaN)")
LABEL = re.compile(rf'([a-zA-Z_][a-zA-Z0-9_]*)="({ESCAPED})"(?:,|$)')


def parse(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """{(sample's name, its labels): its value}.

    Raises:
        AssertionError: the text is not of the grammar.
    """
    *lines, last, nothing = text.split("\n")
    assert (last, nothing) == ("# EOF", ""), "it ends with # EOF and a line break"
    kinds: dict[str, str] = {}
    found: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    family = ""
    for line in lines:
        if meta := META.fullmatch(line):
            what, name, rest = meta.groups()
            if what == "TYPE":
                assert name not in kinds, f"family {name} twice"
                assert rest in ("counter", "gauge"), line
                kinds[name], family = rest, name
            assert name == family, f"{line}: outside of its family"
            assert what != "UNIT" or name.endswith(f"_{rest}"), line
            continue
        sample = SAMPLE.fullmatch(line)
        assert sample, f"no line of OpenMetrics: {line!r}"
        name, inside, value = sample.groups()
        assert name == family + ("_total" if kinds[family] == "counter" else ""), line
        labels, rest = [], inside
        while rest:
            label = LABEL.match(rest)
            assert label, f"no label: {rest!r}"
            labels.append((label[1], re.sub(r"\\(.)", lambda m: {"n": "\n"}.get(m[1], m[1]), label[2])))
            rest = rest[label.end() :]
        assert len({key for key, _ in labels}) == len(labels), f"a label twice: {line}"
        key = (name, tuple(sorted(labels)))
        assert key not in found, f"a sample twice: {line}"
        assert kinds[family] != "counter" or float(value) >= 0, line
        found[key] = float(value)
    return found
