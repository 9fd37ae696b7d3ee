"""No plan, config, saved state or message of a peer can run code: the package does not use calls that would run it.

The package's files are parsed, not run. Whoever adds such a call must say here why it is safe.
"""

from __future__ import annotations

import ast
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hvdcompress
from hvdcompress import load_plan
from hvdcompress.engine.saving import checkpoint
from hvdcompress.loopback import Loopback
from hvdcompress.plan import PlanError, settings_of

PACKAGE = Path(hvdcompress.__file__).parent

#: modules that make objects, and so run code, out of bytes
UNPICKLE = {
    "pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "jsonpickle", "code",
    "multiprocessing.connection",
}  # fmt: skip
#: functions by their last name: those that run text, those that unpickle what peers send
RUN = {"eval", "exec", "compile", "__import__", "import_module", "run_module", "run_path", "system", "popen"}
OBJECTS = {"allgather_object", "all_gather_object", "broadcast_object", "broadcast_object_list", "gather_object"}
#: YAML's functions that may make any object, unless they are given a safe loader
YAML = {"load", "load_all", "full_load", "full_load_all", "unsafe_load", "unsafe_load_all"}

#: (file, what) -> why it is safe
KNOWN = {
    ("ops/__init__.py", "import_module"): "one of the backends that the file lists",
    ("__init__.py", "import_module"): "one of the modules that the file lists",
    ("methods/__init__.py", "import_module"): "one of the modules that the file lists",
    ("registry.py", "import_module"): "our methods, and those that installed packages declare as entry points",
    ("testing/trial.py", "import_module"): "the modules of our own package",
    ("engine/safety/peers.py", "multiprocessing.connection"): "bytes of JSON: `recv`, which unpickles, is not called",
    ("cli/advise/ranks.py", "all_gather_object"): "PyTorch's own, between ranks of one measurement",
    ("cli/advise/ranks.py", "allgather_object"): "Horovod's own, between ranks of one measurement",
    ("cli/advise/workload.py", "import_module"): "--model, --data and others name the user's own functions",
    ("ddp/__main__.py", "run_module"): "the script that the command line names, as python -m does",
    ("ddp/__main__.py", "run_path"): "the script that the command line names",
}


def keyword(call: ast.Call, name: str) -> str | None:
    """Return the source of a keyword argument; None where it is not given."""
    return next((ast.unparse(each.value) for each in call.keywords if each.arg == name), None)


def dangers(tree: ast.AST) -> Iterator[str]:
    """Iterate over everything in a file that could run code out of data."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None) or ""
            names = {module, *(f"{module}.{alias.name}".lstrip(".") for alias in node.names)}
            yield from sorted(name for name in names if name in UNPICKLE or name.split(".")[0] in UNPICKLE - {"code"})
        elif isinstance(node, ast.Attribute) and node.attr in OBJECTS:
            yield node.attr
        elif isinstance(node, ast.Call):
            yield from dangers_of_call(node)


def dangers_of_call(call: ast.Call) -> Iterator[str]:
    whole = ast.unparse(call.func)
    owner, _, name = whole.rpartition(".")
    of_an_object = name in {"eval", "exec", "compile"} and owner not in {"", "builtins"}  # model.eval(), re.compile()
    loader = keyword(call, "Loader") or "".join(map(ast.unparse, call.args[1:2]))
    is_safe = name in {"load", "load_all"} and loader.rpartition(".")[2] in {"SafeLoader", "CSafeLoader"}
    if name in RUN and not of_an_object:
        yield name
    if owner == "yaml" and name in YAML and not is_safe:
        yield whole
    if whole in {"torch.load", "torch.jit.load"} and keyword(call, "weights_only") != "True":
        yield whole
    if whole in {"np.load", "numpy.load"} and keyword(call, "allow_pickle") not in {None, "False"}:
        yield whole  # numpy's default is False
    if keyword(call, "shell") not in {None, "False"}:
        yield "shell"


def test_no_file_runs_code_out_of_data() -> None:
    files = {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
    found = {(name, what) for name, tree in files.items() for what in dangers(tree)}
    assert not found - KNOWN.keys(), "this may run code out of data; if it cannot, say why in KNOWN"
    assert not KNOWN.keys() - found, "KNOWN lists calls that are gone"
    peers = ast.walk(files["engine/safety/peers.py"])
    assert not [node for node in peers if isinstance(node, ast.Attribute) and node.attr == "recv"], "recv unpickles"


@pytest.mark.parametrize(
    "line,what",
    [
        ("import pickle", "pickle"),
        ("import joblib.numpy_pickle", "joblib.numpy_pickle"),
        ("from multiprocessing.connection import Client", "multiprocessing.connection"),
        ("from multiprocessing import connection", "multiprocessing.connection"),
        ("def f():\n    from pickle import loads", "pickle"),
        ("eval(text)", "eval"),
        ("builtins.exec(text)", "exec"),
        ("importlib.import_module(text)", "import_module"),
        ("__import__(text)", "__import__"),
        ("yaml.load(text)", "yaml.load"),
        ("yaml.load(text, Loader=yaml.Loader)", "yaml.load"),
        ("yaml.load(text, yaml.UnsafeLoader)", "yaml.load"),
        ("yaml.unsafe_load(text)", "yaml.unsafe_load"),
        ("yaml.full_load(text)", "yaml.full_load"),
        ("torch.load(file)", "torch.load"),
        ("torch.load(file, weights_only=False)", "torch.load"),
        ("np.load(file, allow_pickle=True)", "np.load"),
        ("subprocess.run(line, shell=True)", "shell"),
        ("os.system(line)", "system"),
        ("hvd.broadcast_object(x)", "broadcast_object"),
        ("gather = dist.all_gather_object", "all_gather_object"),
    ],
)
def test_a_dangerous_call_is_found(line: str, what: str) -> None:
    assert what in set(dangers(ast.parse(line))), line


@pytest.mark.parametrize(
    "line",
    [
        "model.eval()",
        "re.compile(text)",
        "yaml.safe_load(text)",
        "yaml.load(text, Loader=yaml.SafeLoader)",
        "torch.load(file, weights_only=True)",
        "np.load(file)",
        "json.loads(text)",
        "subprocess.run([program])",
    ],
)
def test_a_safe_call_is_not_reported(line: str) -> None:
    assert not set(dangers(ast.parse(line))), line


# -- files that try to run code --------------------------------------------------------------------


@pytest.mark.parametrize(
    "tag", ["!!python/object/apply:pathlib.Path.touch", "!!python/object/new:tuple", "!!python/name:os.system", "!x"]
)
def test_yaml_of_a_plan_makes_no_object(tag: str, tmp_path: Path) -> None:
    file, victim = tmp_path / "plan.yaml", tmp_path / "victim"
    for text in (f"{tag} ['{victim}']", f"method: topk\ndensity: {tag} ['{victim}']", f"{tag} x: topk"):
        file.write_text(text)
        with pytest.raises(PlanError):
            load_plan(file)
    with pytest.raises(PlanError):
        settings_of([f"density={tag} ['{victim}']"])
    assert not victim.exists()


class Bomb:
    """An object whose pickle raises SystemExit when it is loaded, which ``except Exception`` does not hide."""

    def __reduce__(self) -> Any:
        return sys.exit, ("a pickle has run code",)


def test_a_pickle_is_refused_as_a_state(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        pickle.loads(pickle.dumps(Bomb()))
    np.save(tmp_path / "bomb.npy", np.array([Bomb()], object), allow_pickle=True)
    net = Loopback("topk", world_size=1, density=0.5, min_elements=1)
    saved = checkpoint.save(net.ranks[0].state_dict(), tmp_path / "state")
    for data in (pickle.dumps(Bomb()), (tmp_path / "bomb.npy").read_bytes()):
        saved.write_bytes(data)
        with pytest.raises((ValueError, FileNotFoundError)):
            checkpoint.load(tmp_path / "state", 0, 1)
        with pytest.raises(ValueError):
            checkpoint.from_bytes(data)
