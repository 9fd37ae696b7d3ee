"""The rule of the house, held as data: imports point one way, there is no circle, and nothing needs a file outside."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import hvdcompress

PACKAGE = Path(hvdcompress.__file__).parent
FRAMEWORKS = {"torch", "triton", "tensorflow", "keras", "tf_keras", "horovod", "mpi4py"}
FRAMEWORKS |= {"lightning", "accelerate", "transformers"}
COMMAND_LINE = {"typer", "rich", "click"}  # of the extra "cli"

#: Rooms by floor, the lowest first. A file imports from its own room and from lower floors: never from a room above,
#: and never from a room next to its own. The longest prefix of a file's path names its room.
FLOORS: list[set[str]] = [
    {"ops"},
    {"method"},
    {"parts"},
    {"methods"},
    {"registry"},
    {"plan"},
    {"optimizers"},
    {"__init__"},
    {"engine"},
    {"loopback"},
    {"_torch"},
    {"horovod", "horovod/torch", "horovod/tensorflow", "ddp", "mpi"},
    {"fsdp", "horovod/keras", "local_steps"},
    {"integrations"},
    {"testing"},
    {"cli/started", "cli/numbers"},
    {"cli/console"},
    {"cli/advise"},
    {"cli"},
    {"__main__"},
]
#: Frameworks that a room may import; every other room imports none.
FRAMEWORKS_OF = {
    "ops/torch": {"torch"},
    "ops/triton": {"torch", "triton"},
    "_torch": {"torch"},
    "horovod/torch": {"torch", "horovod"},
    "ddp": {"torch"},
    "fsdp": {"torch"},
    "local_steps": {"torch", "horovod"},
    "horovod/tensorflow": {"tensorflow", "horovod"},
    "horovod/keras": {"keras", "tensorflow", "horovod"},
    "mpi": {"mpi4py"},
    "integrations/lightning": {"lightning"},
    "integrations/accelerate": {"torch", "accelerate"},
    "integrations/transformers": {"torch", "transformers"},
    "testing": {"torch"},
    "cli/advise": {"torch", "horovod"},
}


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    """``engine/step`` for hvdcompress/engine/step.py; a folder's face has the folder's name."""
    relative = path.relative_to(PACKAGE).with_suffix("").as_posix()
    return relative.removesuffix("/__init__")


@cache
def nodes(path: Path) -> list[ast.AST]:
    """All nodes of a file. Several tests ask for them, and parsing the package takes seconds."""
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


@cache
def imports(path: Path) -> set[str]:
    """Every module that a file names in an import, wherever it is: lazy and TYPE_CHECKING ones, too."""
    found: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def resolved(module: str) -> str | None:
    """The file of the package that a dotted name stands for: the module itself, or the one that defines the name."""
    head, *words = module.split(".")
    if head != "hvdcompress":
        return None
    while words:
        place = PACKAGE.joinpath(*words)
        if place.with_suffix(".py").is_file() or (place / "__init__.py").is_file():
            return "/".join(words)
        words.pop()
    return "__init__"


@cache
def graph() -> dict[str, set[str]]:
    found = {}
    for path in files():
        targets = {target for module in imports(path) if (target := resolved(module))}
        found[name_of(path)] = targets - {name_of(path)}
    return found


def room_of(name: str) -> str:
    """The longest prefix of a file's name that is a room."""
    rooms = {room for floor in FLOORS for room in floor}
    words = name.split("/")
    for end in range(len(words), 0, -1):
        if "/".join(words[:end]) in rooms:
            return "/".join(words[:end])
    raise AssertionError(f"{name} is in no room: say in FLOORS where it belongs")


def floor_of(name: str) -> int:
    return next(number for number, floor in enumerate(FLOORS) if room_of(name) in floor)


@pytest.mark.parametrize("name", [name_of(path) for path in files()])
def test_imports_point_down(name: str) -> None:
    for target in graph()[name]:
        if room_of(target) != room_of(name):
            assert floor_of(target) < floor_of(name), f"{name} imports {target}, which is not below it"


def test_there_is_no_circle() -> None:
    done: set[str] = set()
    path: list[str] = []

    def visit(name: str) -> None:
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name in done:
            return
        path.append(name)
        for target in sorted(graph().get(name, ())):
            visit(target)
        path.pop()
        done.add(name)

    for name in graph():
        visit(name)


def test_only_drivers_import_frameworks() -> None:
    for path in files():
        name = name_of(path)
        used = {module.split(".")[0] for module in imports(path)} & FRAMEWORKS
        allowed = next((may for room, may in FRAMEWORKS_OF.items() if f"{name}/".startswith(f"{room}/")), set())
        assert used <= allowed, f"{name} imports {sorted(used - allowed)}"


def test_only_the_command_imports_the_packages_of_its_extra() -> None:
    """Nothing that a training process imports is among these: the command is above all of it."""
    for path in files():
        name = name_of(path)
        used = {module.split(".")[0] for module in imports(path)} & COMMAND_LINE
        assert not used or name.startswith("cli"), f"{name} imports {sorted(used)}"


def test_the_library_does_not_import_the_experiments_nor_their_packages() -> None:
    """The wheel has no experiments."""
    forbidden = {"experiments", "pandas", "matplotlib", "psutil"}
    found = {name_of(path) for path in files() if {one.split(".")[0] for one in imports(path)} & forbidden}
    assert not found, found


def test_without_its_extra_the_command_says_what_to_install() -> None:
    code = "import sys; sys.modules['typer'] = None; from hvdcompress.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr == "hvdcompress: the command needs typer: pip install 'hvdcompress[cli]'\n"


def test_the_top_is_small() -> None:
    modules = [path for path in PACKAGE.glob("*.py")]
    folders = [path for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()]
    assert len(modules) <= 8 and len(folders) <= 13, (len(modules), len(folders))


def test_files_have_plain_names_and_import_by_name() -> None:
    for path in files():
        assert path.stem.startswith("__") or not path.stem.startswith("_") or "kernels" in path.stem, path
        assert not any(module.endswith(".*") for module in imports(path)), f"{path}: import *"


def test_the_package_needs_no_file_outside_of_it() -> None:
    """A wheel has the package alone: no path may lead out of it."""
    for path in files():
        depth = len(path.relative_to(PACKAGE).parts)  # parents[depth - 1] is the package itself
        for node in nodes(path):
            if (
                isinstance(node, ast.Subscript)
                and isinstance(node.value, ast.Attribute)
                and node.value.attr == "parents"
            ):
                number = ast.literal_eval(node.slice)
                assert number < depth, f"{path.relative_to(PACKAGE)}:{node.lineno} leads out of the package"


def test_the_wheel_has_every_file() -> None:
    """setup.cfg lists the package's data, and setuptools finds folders by their ``__init__.py``."""
    there = [path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert {path.name for path in there if path.suffix != ".py"} == {"py.typed"}
    assert all((path.parent / "__init__.py").is_file() for path in there)


def test_methods_use_no_array_library_but_ops() -> None:
    """A method speaks through ``ops``, or it would not run on a GPU; numpy is there for scalars and lists of them."""
    for path in sorted((PACKAGE / "methods").glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        used = {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("np", "numpy")
        }
        assert used <= {"float32", "int32", "array"}, f"{path.name} uses numpy's {sorted(used)}"


def test_importing_the_package_imports_no_framework() -> None:
    """One process imports them one after the other: what is there has come with the last one."""
    code = f"""
import importlib, sys
sys.path[:0] = {[str(PACKAGE.parent), *filter(None, sys.path)]!r}
for name in ("hvdcompress", "hvdcompress.engine.telemetry.ledger", "hvdcompress.loopback", "hvdcompress.testing"):
    importlib.import_module(name)
    sys.modules["hvdcompress"].get("topk")
    print(name, sorted(set(sys.modules) & {FRAMEWORKS!r}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    found = done.stdout.splitlines()
    assert len(found) == 4 and all(line.endswith(" []") for line in found), found


@pytest.mark.parametrize(
    "code,loaded",
    [
        ("import hvdcompress", set()),
        ("import hvdcompress; hvdcompress.get('topk')", {"numpy", "pydantic", "none", "topk"}),
        ("import torch; from hvdcompress import ddp", {"numpy", "pydantic", "none"}),
        ("from hvdcompress.loopback import Loopback", {"numpy", "pydantic", "none"}),
    ],
)
def test_what_is_not_used_is_not_imported(code: str, loaded: set[str]) -> None:
    if "torch" in code:
        pytest.importorskip("torch")
    code += """
import sys
heavy = {"numpy", "pydantic", "numba", "scipy.fft"} & set(sys.modules)
prefix = "hvdcompress.methods."
print(*heavy, *[name.removeprefix(prefix) for name in sys.modules if name.startswith(prefix)])
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert set(found.stdout.split()) <= loaded


def test_the_public_face() -> None:
    for name in ("available", "get", "load", "__version__"):
        assert hasattr(hvdcompress, name) and name in dir(hvdcompress)
    with pytest.raises(AttributeError, match="no attribute 'avaliable'"):
        hvdcompress.avaliable  # noqa: B018
    assert set(hvdcompress.__all__) >= {"available", "get", "load", "__version__"}
