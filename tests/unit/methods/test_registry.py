"""Methods are found and created by name; wrong names and values are refused."""

from __future__ import annotations

import sys
import textwrap
from dataclasses import fields
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from pydantic import Field

import hvdcompress
from hvdcompress import method as contract
from hvdcompress import methods, registry
from hvdcompress.loopback import Loopback
from hvdcompress.method import Method
from hvdcompress.testing import check_method


def test_every_file_in_methods_is_a_method_and_its_name_the_id() -> None:
    folder = Path(hvdcompress.__file__).parent / "methods"
    files = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    found = hvdcompress.available()
    assert found == sorted(found) and files <= set(found)
    for id, cls in registry.classes().items():
        assert cls.id == id and issubclass(cls, Method)
        with pytest.raises((TypeError, ValueError)):
            cls(0.5)  # there are no positional arguments


@pytest.mark.parametrize(
    "id,given,words",
    [
        ("topkk", {}, ["topkk", "did you mean 'topk'", "available"]),
        ("topk", {"densty": 0.1}, ["densty", "did you mean 'density'", "it has"]),
        ("topk", {"density": 0.0}, ["density", "greater than 0"]),
        ("topk", {"density": 1.5}, ["density", "1.5", "less than or equal to 1"]),
        ("topk", {"density": True}, ["density", "boolean"]),
        ("topk", {"density": "lots"}, ["density", "lots"]),
        ("topk", {"density": float("nan")}, ["density"]),
        ("topk", {"values": "fp8"}, ["values", "fp8", "bf16"]),
        ("topk", {"feedback": "yes"}, ["feedback", "lowpass"]),
        ("scalecom", {"beta": 0}, ["beta"]),
        ("scalecom", {"select": "best"}, ["select", "exact"]),
        ("gaussiank", {"refine": "never"}, ["refine", "paper"]),
        ("gaussiank", {"scope": "all"}, ["scope", "global"]),
        ("gradiveq", {"paper": 1}, ["paper", "true or false"]),
        ("gradiveq", {"paper": True, "samples": "all"}, ["samples", "'all'", "paper: true", "'first'"]),
        ("topk", {"paper": True}, ["topk", "paper"]),
        ("randomk", {"unbiased": True}, ["unbiased", "feedback"]),
        ("topk", {"id": "x"}, ["id"]),
        (["topk"], {}, ["unknown method"]),
        (None, {}, ["unknown method"]),
        *(("powersgd", given, []) for given in ({"matrix_rank": 0}, {"matrix_rank": True}, {"values": "fp8"})),
        *(("fft", given, []) for given in ({"block": 3}, {"block": -4}, {"density": 0}, {"recovery": 0.5})),
        ("fft", {"tolerance": -1}, []),
        *((id, {"density": 1e-300}, []) for id in ("topk", "gaussiank")),  # nothing could be selected by a threshold
        *(("arctopk", given, []) for given in ({"row": 10**9}, {"sketch": 10**9}, {"row": 0})),  # memory
        ("gradiveq", {"dense_steps": 10**9}, []),
        # settings that would have no effect
        ("topk", {"momentum": 0.9}, ["no effect", "feedback 'momentum'"]),
        ("topk", {"beta": 0.1}, ["no effect", "feedback 'lowpass'"]),
        ("dgc", {"sample": 0.5}, ["no effect", "select 'sampled'"]),
        ("redsync", {"interval": 9, "select": "trimmed"}, ["no effect", "'search' or 'paper'"]),
        *(
            ("gradiveq", given, [])
            for given in (
                *({"lam": 1.0}, {"lam": -0.1}, {"dense_steps": 1}, {"compressed_steps": 0}, {"slice_elements": -1}),
                *({"matrix_rank": 0}, {"retrain_drop": 1.5}, {"retrain_error": 0}, {"tensors": "some"}),
                *({"dense_values": "qsgd9"}, {"samples": "last"}, {"max_samples": 0}, {"order": "stored"}),
                *({"mean": 3}, {"min_rate": 0.5}, {"paper": "yes"}, {"order": "oihw", "paper": True}),
                *({"mean": False, "paper": True}, {"min_rate": 8, "paper": True}),
            )
        ),
    ],
)
def test_errors_name_the_setting(id: Any, given: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        hvdcompress.get_method(id, **given)
    for word in (*list(given)[:1], *words):
        assert word in str(caught.value)


def test_paper_stands_for_the_settings_of_the_paper() -> None:
    method = hvdcompress.get_method("gradiveq", paper=True, dense_steps=7)
    assert method == hvdcompress.get_method("gradiveq", dense_steps=7, **type(method).published)
    assert method == hvdcompress.get_method("gradiveq", paper=True, samples="first", dense_steps=7)
    assert method == hvdcompress.get_method("gradiveq", paper=True, **method.hyperparameters())
    assert hvdcompress.get_method("gradiveq", paper=False) == hvdcompress.get_method("gradiveq") != method
    for cls in registry.classes().values():
        assert cls.published.keys() <= {field.name for field in fields(cls)}


SOURCE = """
    '''A third party's method.'''
    from hvdcompress.method import AllReduce, Method, Reduced
    from hvdcompress.registry import method

    @method
    class Plain(Method):
        paper, sends = "none", "4n bytes"

        def num_bytes(self, spec, world_size):
            return 4 * spec.size

        def exchange(self, x, state, ctx, work):
            return Reduced(total=(yield AllReduce(x)), own=x.copy())
"""


@pytest.fixture
def fresh_registry() -> Any:
    registry.classes.cache_clear()
    yield
    registry.classes.cache_clear()


def _entry_point(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str) -> None:
    (folder / f"{name}.py").write_text(textwrap.dedent(SOURCE), encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, name, raising=False)
    point = EntryPoint(name, name, "hvdcompress.methods")
    monkeypatch.setattr(registry, "entry_points", lambda group: [point])


def test_entry_points_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fresh_registry: None) -> None:
    _entry_point(monkeypatch, tmp_path, "thirdparty_plain")
    assert "thirdparty_plain" in hvdcompress.available()
    check_method(hvdcompress.get_method("thirdparty_plain"), world_sizes=(2,), sizes=(1, 9), steps=2)
    assert hvdcompress.load_plan({"method": "thirdparty_plain"}).program.main.id == "thirdparty_plain"
    assert registry.docstring(registry.classes()["thirdparty_plain"]) == "A third party's method."


def test_two_methods_of_one_id_are_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fresh_registry: None
) -> None:
    _entry_point(monkeypatch, tmp_path, "topk")
    with pytest.raises(RuntimeError, match="'topk'"):
        hvdcompress.available()


def test_class_can_be_registered_again() -> None:
    """As in a notebook, where running a cell again makes the class again."""
    for scale in (1, 2):

        @contract.method("mine")
        class Mine(contract.Method):
            paper, sends = "none", "4n bytes"
            factor = scale

            def num_bytes(self, spec, world_size):
                return 4 * spec.size

            def exchange(self, x, state, ctx, work):
                total = yield contract.AllReduce(x * np.float32(self.factor))
                return contract.Reduced(total=total)

    assert "mine" in hvdcompress.available() and hvdcompress.get_method("mine") == Mine()
    ones = np.ones(2000, np.float32)
    assert Loopback("mine", world_size=2).allreduce([ones, ones], name="w")[0][0] == 2.0
    assert hvdcompress.load_plan(hvdcompress.load_plan({"method": "mine"}).to_dict()).program.main == Mine()
    with pytest.raises(ValueError, match="'topk' belongs to a method"):
        contract.method("topk")


def test_options_list_their_values_in_words() -> None:
    """Of an option of every kind, also of types that a third party writes without the library's validators."""

    class Given(Method):
        few: Annotated[int, contract.Number, Field(ge=2, le=8)] = 2
        share: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
        norm: Literal["max", "l2"] = "max"
        only: Literal["max"] = "max"
        half: bool = False
        values: contract.Values = "fp32"

    found = {one.name: one.values for one in registry.options(registry.method(Given))}
    assert [*found][:6] == ["few", "share", "norm", "only", "half", "values"]
    assert found["few"] == "integer, ≥ 2 and ≤ 8"
    assert found["share"] == "number, > 0 and < 1; or `null`"
    assert found["norm"] == "`max` | `l2`" and found["only"] == "`max`"
    assert found["half"] == "`true` | `false`"
    assert "`qsgd2` … `qsgd8`" in found["values"]


def test_every_method_has_its_class_in_the_package() -> None:
    classes = {getattr(methods, name) for name in methods.__all__}
    assert classes == {registry.classes()[id] for id in hvdcompress.available()}
    with pytest.raises(AttributeError, match="TopQ"):
        _ = methods.TopQ
