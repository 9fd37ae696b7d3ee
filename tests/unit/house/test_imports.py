"""Imports: layers that import only lower ones, no circles, and no framework or file that may be missing."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import hvdcompress

PACKAGE = Path(hvdcompress.__file__).parent
FRAMEWORKS = {
    "torch", "triton", "tensorflow", "keras", "tf_keras", "horovod", "mpi4py",
    "lightning", "accelerate", "transformers",
}  # fmt: skip

#: Components by layer, the lowest first. A file imports from its own component and from lower layers only. The longest
#: prefix of a file's path names its component.
LAYERS: list[set[str]] = [
    {"launchers"},
    {"ops"},
    {"method"},
    {"parts"},
    {"methods"},
    {"registry"},
    {"plan", "settings"},
    {"__init__"},
    {"engine"},
    {"loopback"},
    {"_torch"},
    {"horovod/process_sets"},
    {"horovod", "horovod/torch", "horovod/tensorflow", "ddp", "mpi"},
    {"fsdp", "horovod/keras", "local_steps"},
    {"integrations"},
    {"testing"},
    {"cli/numbers"},
    {"cli/console"},
    {"cli/advise"},
    {"cli"},
    {"__main__"},
]
#: Optional packages that a component may import; every other one imports none.
OPTIONAL = FRAMEWORKS | {"typer", "rich", "click", "experiments", "pandas", "matplotlib", "psutil"}
OPTIONAL_OF = {
    "ops/torch": {"torch"},
    "ops/triton": {"torch", "triton"},
    "_torch": {"torch"},
    "horovod/torch": {"torch", "horovod"},
    "ddp": {"torch"},
    "fsdp": {"torch"},
    "local_steps": {"torch"},
    "horovod/tensorflow": {"tensorflow", "horovod"},
    "horovod/keras": {"keras", "tensorflow", "horovod"},
    "mpi": {"mpi4py"},
    "integrations/lightning": {"torch", "lightning"},
    "integrations/accelerate": {"torch", "accelerate"},
    "integrations/transformers": {"torch", "transformers"},
    "testing": {"torch"},
    "cli": {"typer", "rich", "click"},  # of the extra "cli"
    "cli/advise": {"torch", "horovod"},
}


FILES = sorted(PACKAGE.rglob("*.py"))
NAMES = [path.relative_to(PACKAGE).with_suffix("").as_posix().removesuffix("/__init__") for path in FILES]


@cache
def nodes(path: Path) -> list[ast.AST]:
    """Return all nodes of a file; parsing the package takes seconds, and several tests need it."""
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


@cache
def imports(path: Path) -> set[str]:
    """Return every module that a file imports anywhere, lazily and for type checking, too."""
    found: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def file_of(module: str) -> str:
    """Return the name of the package's file that a dotted name stands for: the module, or the one that defines it."""
    words = module.split(".")[1:]
    while words and "/".join(words) not in NAMES:
        words.pop()
    return "/".join(words) or "__init__"


@cache
def graph() -> dict[str, set[str]]:
    """Return the imports within the package, by file."""
    ours = ({file_of(module) for module in imports(path) if module.split(".")[0] == "hvdcompress"} for path in FILES)
    return {name: targets - {name} for name, targets in zip(NAMES, ours, strict=True)}


def layer_of(name: str) -> tuple[int, str]:
    """Return a file's layer and component."""
    words = name.split("/")
    prefixes = ["/".join(words[:end]) for end in range(len(words), 0, -1)]
    found = [(number, prefix) for prefix in prefixes for number, layer in enumerate(LAYERS) if prefix in layer]
    assert found, f"{name} is in no component: say in LAYERS where it belongs"
    return found[0]


def test_imports_point_down_and_not_in_circles() -> None:
    for name, targets in graph().items():
        for target in targets:
            layer, component = layer_of(target)
            below = component == layer_of(name)[1] or layer < layer_of(name)[0]
            assert below, f"{name} imports {target}, which is not in a lower layer"
    TopologicalSorter(graph()).prepare()  # raises CycleError, which lists the files of a circle


def test_frameworks_and_other_optional_packages_are_imported_only_where_they_are_allowed() -> None:
    for name, path in zip(NAMES, FILES, strict=True):
        allowed = set().union(*(may for part, may in OPTIONAL_OF.items() if f"{name}/".startswith(f"{part}/")))
        used = {module.split(".")[0] for module in imports(path)} & OPTIONAL
        assert used <= allowed, f"{name} imports {sorted(used - allowed)}"
        assert not any(module.endswith(".*") for module in imports(path)), f"{name}: import *"


def test_methods_use_no_array_library_but_ops() -> None:
    """A method calls ``ops``, or it would not run on a GPU; numpy is there for scalars and lists of them."""
    for path in sorted((PACKAGE / "methods").glob("*.py")):
        attributes = [node for node in nodes(path) if isinstance(node, ast.Attribute)]
        used = {node.attr for node in attributes if ast.unparse(node.value) in ("np", "numpy")}
        assert used <= {"float32", "int32", "array"}, f"{path.name} uses numpy's {sorted(used)}"


def test_the_package_needs_no_file_outside_of_it() -> None:
    """A wheel has the package alone: ``Path(__file__).parents[n]`` must stay in it."""
    for path in FILES:
        depth = len(path.relative_to(PACKAGE).parts)  # parents[depth - 1] is the package itself
        for node in nodes(path):
            if isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith(".parents"):
                assert ast.literal_eval(node.slice) < depth, f"{path}:{node.lineno} leads out of the package"


def test_the_wheel_has_every_file() -> None:
    """setup.cfg lists the package's data, and setuptools finds folders by their ``__init__.py``."""
    there = [path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert {path.name for path in there if path.suffix != ".py"} == {"py.typed", "settings.pyi"}
    assert all((path.parent / "__init__.py").is_file() for path in there)


# -- what an import loads --------------------------------------------------------------------------


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


def test_without_its_extra_the_command_says_what_to_install() -> None:
    done = run("import sys; sys.modules['typer'] = None; from hvdcompress.__main__ import main; main()")
    assert done.returncode == 2
    assert done.stderr == "hvdcompress: the command needs typer: pip install 'hvdcompress[cli]'\n"


@pytest.mark.parametrize(
    "code,allowed",
    [
        ("import hvdcompress", set()),
        ("import hvdcompress; hvdcompress.get_method('topk')", {"numpy", "pydantic", "none", "topk"}),
        ("import torch; from hvdcompress import ddp", {"numpy", "pydantic", "none", "torch"}),
        ("from hvdcompress.loopback import Loopback", {"numpy", "pydantic", "none"}),
        ("import hvdcompress.testing, hvdcompress.engine.telemetry.ledger", None),
    ],
)
def test_an_import_loads_only_what_it_needs(code: str, allowed: set[str] | None) -> None:
    """No framework, and no method that is not used; ``hvdcompress.testing`` may load all of the package."""
    if "torch" in code:
        pytest.importorskip("torch")
    done = run(f"{code}\nimport sys\nprint(*sys.modules)")
    assert done.returncode == 0, done.stderr
    loaded = {name.removeprefix("hvdcompress.methods.") for name in done.stdout.split()}
    heavy = {"numpy", "pydantic", "numba", "scipy.fft", *(path.stem for path in PACKAGE.glob("methods/[a-z]*.py"))}
    assert not loaded & (FRAMEWORKS if allowed is None else FRAMEWORKS | heavy) - (allowed or set())


def test_the_public_names() -> None:
    assert set(dir(hvdcompress)) >= set(hvdcompress.__all__) >= {"available", "get_method", "load_plan", "__version__"}
    with pytest.raises(AttributeError, match="no attribute 'avaliable'"):
        hvdcompress.avaliable  # noqa: B018
