"""No code comes out of a plan, a config, a saved state or a peer's bytes: the calls that could run some are not used.

The package's files are read, not run: whoever adds such a call must say here why it is safe.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hvdcompress
from hvdcompress import load
from hvdcompress.engine.saving import checkpoint
from hvdcompress.plan import PlanError, settings_of

PACKAGE = Path(hvdcompress.__file__).parent

#: modules that make objects, and so run code, out of bytes
UNPICKLE = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "jsonpickle", "code"}
UNPICKLE |= {"multiprocessing.connection"}
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
    ("cli/app.py", "shell"): "the name of a shell, for which the completion script is printed",
    ("ddp/__main__.py", "run_module"): "the script that the command line names, as python -m does",
    ("ddp/__main__.py", "run_path"): "the script that the command line names",
}


def keyword(call: ast.Call, name: str) -> Any:
    """The source of a keyword argument; None where it is not given."""
    return next((ast.unparse(each.value) for each in call.keywords if each.arg == name), None)


def dangers(tree: ast.AST) -> Iterator[str]:
    """What in a file could run code that comes out of data."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None) or ""
            names = {module, *(f"{module}.{alias.name}".lstrip(".") for alias in node.names)}
            yield from sorted(name for name in names if name in UNPICKLE or name.split(".")[0] in UNPICKLE - {"code"})
        elif isinstance(node, ast.Attribute) and node.attr in OBJECTS:
            yield node.attr
        elif isinstance(node, ast.Call):
            whole = ast.unparse(node.func)
            owner, _, name = whole.rpartition(".")
            builtin = name in {"eval", "exec", "compile"} and owner not in {
                "",
                "builtins",
            }  # model.eval(), re.compile()
            if name in RUN and not builtin:
                yield name
            elif owner == "yaml" and name in YAML:
                loader = keyword(node, "Loader") or (ast.unparse(node.args[1]) if len(node.args) > 1 else "")
                if not (name in {"load", "load_all"} and loader.rpartition(".")[2] in {"SafeLoader", "CSafeLoader"}):
                    yield f"yaml.{name}"
            elif whole in {"torch.load", "torch.jit.load"} and keyword(node, "weights_only") != "True":
                yield whole
            elif whole in {"np.load", "numpy.load"} and keyword(node, "allow_pickle") not in {None, "False"}:
                yield whole  # numpy's default is False
            elif keyword(node, "shell") not in {None, "False"}:
                yield "shell"


@cache
def found() -> frozenset[tuple[str, str]]:
    return frozenset(
        (path.relative_to(PACKAGE).as_posix(), what)
        for path in sorted(PACKAGE.rglob("*.py"))
        for what in dangers(ast.parse(path.read_text(encoding="utf-8")))
    )


def test_no_file_runs_code_that_comes_out_of_data() -> None:
    new = found() - KNOWN.keys()
    assert not new, f"this may run code that comes out of data: {sorted(new)}; if it cannot, say why in KNOWN"


def test_what_is_known_is_there() -> None:
    gone = KNOWN.keys() - found()
    assert not gone, f"KNOWN speaks of what is not there any more: {sorted(gone)}"


def test_what_reads_plans_and_states_has_nothing_of_the_kind() -> None:
    """Below the commands there are imports of modules, and no more."""
    peers = ast.parse((PACKAGE / "engine" / "safety" / "peers.py").read_text(encoding="utf-8"))
    assert not [node for node in ast.walk(peers) if isinstance(node, ast.Attribute) and node.attr == "recv"]
    for file, what in KNOWN:
        if not file.startswith(("cli/", "engine/safety/peers")):
            assert what in {"import_module", "run_module", "run_path"}, (file, what)


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
def test_what_would_be_found(line: str, what: str) -> None:
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
def test_what_is_safe(line: str) -> None:
    assert not set(dangers(ast.parse(line))), line


# -- and tried -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tag", ["!!python/object/apply:pathlib.Path.touch", "!!python/object/new:tuple", "!!python/name:os.system", "!x"]
)
def test_a_plans_yaml_makes_no_object(tag: str, tmp_path: Path) -> None:
    file, victim = tmp_path / "plan.yaml", tmp_path / "victim"
    for text in (f"{tag} ['{victim}']", f"method: topk\ndensity: {tag} ['{victim}']", f"{tag} x: topk"):
        file.write_text(text)
        with pytest.raises(PlanError):
            load(file)
        with pytest.raises(PlanError):
            settings_of([f"density={tag} ['{victim}']"])
    assert not victim.exists()


class Bomb:
    """A pickle of it touches a file when it is loaded."""

    def __init__(self, victim: Path):
        self.victim = victim

    def __reduce__(self) -> Any:
        return Path.touch, (self.victim,)


def test_a_state_that_is_a_pickle_is_refused_unopened(tmp_path: Path) -> None:
    import pickle

    victim, folder = tmp_path / "victim", tmp_path / "state"
    bomb = pickle.dumps(Bomb(victim))
    pickle.loads(pickle.dumps(Bomb(tmp_path / "control")))
    assert (tmp_path / "control").exists(), "the bomb works"
    with pytest.raises(ValueError):
        checkpoint.from_bytes(bomb)
    saved = checkpoint.save(_state(), folder)
    np.save(victim.with_suffix(".npy"), np.array([Bomb(victim)], object), allow_pickle=True)
    for data in (bomb, victim.with_suffix(".npy").read_bytes()):
        saved.write_bytes(data)
        with pytest.raises((ValueError, FileNotFoundError)):
            checkpoint.load(folder, 0, 1)
    assert not victim.exists()


def _state() -> dict[str, Any]:
    from hvdcompress.loopback import Loopback

    net = Loopback("topk", world_size=1, density=0.5, min_elements=1)
    net.allreduce([np.ones(8, np.float32)])
    saved = net.ranks[0].state_dict()
    json.dumps({key: saved[key] for key in ("plan", "steps", "world", "rank")})  # text and numbers alone
    return saved
