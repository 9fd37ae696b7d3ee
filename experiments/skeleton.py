"""``hvdcompress new-method``: the file of a method that works, and a test that holds it to the contract.

What is written is a top-k with comments that say what to change: it passes the conformance suite as it is.
"""

from __future__ import annotations

import keyword
import re
from pathlib import Path

from hvdcompress import registry

__all__ = ["next_step", "write"]

METHOD = '''\
"""{title}: say in one sentence what each rank sends.

Name the paper here, with its section or equation.

    x = g + residual
    I = the k largest |x|,      k = min(n, max(1, floor(n·density)))
    send (I, x[I]);             residual = x, with x[I] set to 0

What is sent: k (index, value) pairs per rank, by an all-gather.

Bytes: 24 (header) + indices + 4·k, sections rounded up to 4.

When it loses: the received bytes grow with p.

Departures from the paper: none.
"""

from __future__ import annotations

from hvdcompress.method import Array, Context, Density, FeedbackName, Method, Sparse, TensorSpec, Workspace, method
from hvdcompress.parts import pack, select


@method
class {cls}(Method):
    """Say in one line what the method does: the reference shows this line."""

    paper = "Author et al., Conference Year (arXiv number)"
    sends = "k values + k indices, gathered: received bytes grow with p"
    sparse = True  # a step sends some elements exactly, and leaves out the others
    needs_feedback = True  # without a residual, training would be badly biased

    density: Density = 0.01
    """Fraction of the elements that each rank sends, k / n."""
    feedback: FeedbackName = "plain"

    def counts(self, spec: TensorSpec) -> list[int]:
        """Return k for each tensor of the bucket."""
        return [select.num_kept(self.density, size) for size in spec.parts]

    def num_bytes(self, spec: TensorSpec, world_size: int) -> int:
        """Return the bytes that a rank hands to its collectives. Tests compare them with the real number."""
        return pack.num_bytes(sum(self.counts(spec)), self.packing(spec))

    def packing(self, spec: TensorSpec) -> pack.Packing:
        """Return the payload format of the bucket."""
        return pack.Packing(self.id, "fp32", spec.size)

    def encode(self, x: Array, state: dict[str, Array], ctx: Context, work: Workspace) -> Array:
        """Return the payload of x [n] float32, gradient + residual. Use ``work.ops`` only: x may be on a GPU."""
        chosen = select.largest(x, self.counts(ctx.spec), ctx, work)
        return pack.encode(chosen, self.packing(ctx.spec), ctx, work)

    def decode(self, payload: Array, ctx: Context, work: Workspace) -> Sparse:
        """Return one rank's share of the sum, from its payload."""
        return pack.decode(payload, sum(self.counts(ctx.spec)), self.packing(ctx.spec), work.ops)
'''

TEST = '''\
"""{name}: what is its own; the conformance suite checks what all methods have in common."""

from __future__ import annotations

import numpy as np
{imports}

def test_it_keeps_the_contract() -> None:
    check_method({cls}(density=0.1))


def test_what_is_not_sent_stays_in_the_residual() -> None:
    net = Loopback({cls}(density=0.25), world_size=2, min_elements=1)
    gradients = [np.float32([4, 1, 0, -2]), np.float32([1, -6, 0, 2])]
    mean = net.allreduce(gradients, name="w")[0]
    kept = sum(net.residual("w", rank) for rank in range(2))
    np.testing.assert_allclose(2 * mean + kept, gradients[0] + gradients[1])
'''

PROJECT = """\
[build-system]
requires = ["setuptools>=64"]
build-backend = "setuptools.build_meta"

[project]
name = "hvdcompress-{dashed}"
version = "0.1"
dependencies = ["hvdcompress"]

# a plan, the command line and the documentation find the method where this package is installed
[project.entry-points."hvdcompress.methods"]
{name} = "{name}"

[tool.setuptools]
py-modules = ["{name}"]

[tool.pytest.ini_options]
pythonpath = ["."]
"""


def write(name: str, folder: Path | None = None) -> list[Path]:
    """Write a method's file and its test.

    Args:
        name: the method's id.
        folder: where a package is written; None: into the project's sources if the current folder is a checkout of it,
            or else into a new folder of the method's name.

    Returns:
        The files that were written.

    Raises:
        ValueError: the name is no id, or is taken.
        FileExistsError: one of the files exists; nothing is written then.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise ValueError(f"{name!r} is no id: lower-case letters, digits and underscores, a letter first")
    if name in registry.available():
        raise ValueError(f"there is a method {name!r} already; `hvdcompress methods {name}` describes it")
    words = {"name": name, "dashed": name.replace("_", "-"), "cls": name.title().replace("_", ""), "title": name}
    if folder is None and _is_checkout():
        source, test, more = Path("hvdcompress/methods"), Path("tests/unit/methods"), {}
        place = f"hvdcompress.methods.{name}"
    else:
        folder = folder or Path(name)
        source, test, place = folder, folder / "tests", name
        more = {folder / "pyproject.toml": PROJECT.format(**words)}
    ours = "from hvdcompress.loopback import Loopback\n"
    suite, mine = "from hvdcompress.testing import check_method\n", f"from {place} import {words['cls']}\n"
    # as ruff sorts imports: those of a project's own package come last
    imports = f"\n{ours}{mine}{suite}" if place != name else f"{ours}{suite}\n{mine}"
    texts = {
        source / f"{name}.py": METHOD.format(**words),
        test / f"test_{name}.py": TEST.format(**words, imports=imports),
        **more,
    }
    if there := [str(file) for file in texts if file.exists()]:
        raise FileExistsError(f"{', '.join(there)} exists already: choose another name or folder, or delete it first")
    for file, text in texts.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return list(texts)


def next_step(name: str, folder: Path | None = None) -> str:
    """The commands that go on from there."""
    if folder is None and _is_checkout():
        return f"pytest tests/unit/methods/test_{name}.py; python tests/make_golden.py {name} (see CONTRIBUTING.md)"
    place = folder or Path(name)
    return f"cd {place} && python -m pytest; pip install -e . makes `method: {name}` known to plans"


def _is_checkout() -> bool:
    """Whether the current folder is the project's."""
    return Path("hvdcompress/methods").is_dir() and Path("tests/make_golden.py").is_file()
