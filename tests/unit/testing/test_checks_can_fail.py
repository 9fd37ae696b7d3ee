"""Every check of ``check_method`` can fail: it notices a fault that is planted in the library or in a method."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest

import hvdcompress
from hvdcompress import registry, testing
from hvdcompress.engine.exchange import Exchange
from hvdcompress.engine.state import RankState
from hvdcompress.engine.telemetry.ledger import Ledger
from hvdcompress.loopback import Loopback
from hvdcompress.method import AllReduce, Method, Reduced, Slot, Sparse
from hvdcompress.ops.numpy import ops as reference
from hvdcompress.parts import feedback, pack, seed, wire
from hvdcompress.testing import Check, check_method

pytestmark = pytest.mark.slow

# -- faults: functions that replace the original attribute of a class or module -----------------------------------


def change_result(change: Callable[[Any, Reduced], Reduced]) -> Any:
    def fault(exchange: Any) -> Any:
        def mutant(self: Any, *rest: Any) -> Any:
            return change(self, (yield from exchange(self, *rest)))

        return mutant

    return fault


keep_old_residual = change_result(
    lambda self, reduced: replace(reduced, state={name: self.state[name] for name in reduced.state})
)
return_undeclared_state = change_result(lambda self, reduced: replace(reduced, state={"undeclared": np.zeros(1)}))


def ignore_unbiased(exchange: Any) -> Any:
    def mutant(self: Any, *rest: Any) -> Any:
        return exchange(hvdcompress.get_method("randomk", **{**self.hyperparameters(), "unbiased": False}), *rest)

    return mutant


def count_no_broadcasts(sent: Any) -> Any:
    return lambda self, rank, name, what: what.collective == "Broadcast" or sent(self, rank, name, what)


def send_more_if(condition: Callable[[Any, Any, Any], bool]) -> Any:
    """Send another collective if the condition holds for (x, context, workspace)."""

    def fault(exchange: Any) -> Any:
        def mutant(self: Any, x: Any, state: Any, ctx: Any, work: Any) -> Any:
            if condition(x, ctx, work):
                yield AllReduce(np.zeros(1, np.float32))
            return (yield from exchange(self, x, state, ctx, work))

        return mutant

    return fault


def reseed_global_generator(distinct_indices: Any) -> Any:
    def mutant(key: Any, k: int, n: int) -> Any:
        np.random.seed(int(key[0]) % 1000)
        return np.sort(np.random.permutation(n)[:k])

    return mutant


def commit_bad_step(abandon: Any) -> Any:
    def mutant(self: Exchange, fill: bool = False) -> None:
        self.rank_state.swap({self.name: self.new_state()})
        for out in self.outs:
            out[:] = float("nan")

    return mutant


def add_to_old_residual(receive: Any) -> Any:
    """A step that is abandoned cannot be undone then."""

    def mutant(self: Any, gradients: Any, indices: Any, spans: Any, *rest: Any) -> Any:
        for gradient, span in zip(gradients, spans, strict=True):
            self.state[feedback.RESIDUAL][slice(*span)] += gradient
        return receive(self, [np.zeros_like(gradient) for gradient in gradients], indices, spans, *rest)

    return mutant


def forget_steps(load: Any) -> Any:
    def mutant(self: RankState, *args: Any, **more: Any) -> None:
        load(self, *args, **more)
        self.states = {name: replace(state, step=0) for name, state in self.states.items()}

    return mutant


def save_rank_0_for_all(saved: Any) -> Any:
    def mutant(self: Any) -> Any:
        ranks = saved(self)
        return [{**each, "state": ranks[0]["state"]} for each in ranks]

    return mutant


def return_views(state_dict: Any) -> Any:
    def mutant(self: RankState) -> dict[str, Any]:
        views = {name: state.slots for name, state in self.states.items()}
        return {**state_dict(self), "state": views}

    return mutant


def divide_by_float32_norm(exchange: Any) -> Any:
    """The norm overflows at 1e37."""

    def mutant(self: Any, x: Any, state: Any, ctx: Any, work: Any) -> Any:
        norm = np.float32(np.sqrt((x * x).sum())) + np.float32(1)
        total = yield AllReduce(x / norm)
        return Reduced(total=total * norm, own=x)

    return mutant


def write_in_memory_order(allreduce: Any) -> Any:
    def mutant(self: Loopback, arrays: Any, *rest: Any, **more: Any) -> Any:
        results = allreduce(self, arrays, *rest, **more)
        if isinstance(arrays[0], dict):
            return results
        pairs = zip(results, arrays, strict=True)
        return [o.ravel().reshape(o.shape, order="C" if g.flags.c_contiguous else "F") for o, g in pairs]

    return mutant


def double_gradient_in_place(exchange: Any) -> Any:
    def mutant(self: Any, x: Any, state: Any, ctx: Any, work: Any) -> Any:
        x *= 2
        total = yield AllReduce(x)
        return Reduced(total=total, own=x)

    return mutant


def decode_damaged_bytes(decode: Any) -> Any:
    def mutant(payload: Any, k: int, packing: pack.Packing, ops: Any) -> Sparse:
        try:
            return decode(payload, k, packing, ops)
        except wire.WireError:
            return Sparse(np.array([packing.positions]), np.zeros(1, np.float32))

    return mutant


def raise_value_error(check: Any) -> Any:
    def mutant(*args: Any) -> None:
        try:
            check(*args)
        except wire.WireError as error:
            raise ValueError(str(error)) from None

    return mutant


class Fault(NamedTuple):
    """A fault, the check that notices it, and the method that is checked."""

    check: Check
    owner: Any
    attribute: str
    mutate: Callable[[Any], Any]
    method: str
    settings: dict[str, Any] = {}  # noqa: RUF012 (never changed)
    message: str | None = None


def cls(id: str) -> Any:
    return type(hvdcompress.get_method(id))


FEEDBACK = feedback.Feedback
FAULTS = {
    "method can be changed": Fault(
        testing.check_value, cls("none"), "__setattr__", lambda _: object.__setattr__, "none", message="frozen"
    ),
    "equal methods differ": Fault(
        testing.check_value, cls("none"), "__hash__", lambda _: lambda self: id(self), "none", message="is not equal"
    ),
    "gradient is written": Fault(
        testing.check_shapes, cls("none"), "exchange", double_gradient_in_place, "none",
        message="read-only|input was changed",
    ),
    "result depends on layout": Fault(
        testing.check_layout, Loopback, "allreduce", write_in_memory_order, "none", message="F-ordered"
    ),
    "norm overflows": Fault(
        testing.check_finite, cls("none"), "exchange", divide_by_float32_norm, "none", message="not finite"
    ),
    "state is not declared": Fault(
        testing.check_state, cls("topk"), "exchange", return_undeclared_state, "topk", message="undeclared"
    ),
    "ranks draw different indices": Fault(
        testing.check_results, seed, "shared_key", lambda _: seed.private_key, "randomk"
    ),
    "residual is not updated": Fault(testing.check_conservation, FEEDBACK, "exchange", keep_old_residual, "gaussiank"),
    "own share is added to the residual": Fault(
        testing.check_conservation, reference, "subtract",
        lambda subtract: lambda x, own, factor: subtract(x, own, -factor), "scalecom",
    ),
    "random selection is biased": Fault(
        testing.check_unbiased, cls("randomk"), "exchange", ignore_unbiased, "randomk",
        {"feedback": "none", "unbiased": True},
    ),
    "broadcasts are not counted": Fault(testing.check_bytes, Ledger, "sent", count_no_broadcasts, "scalecom"),
    "num_bytes omits the header": Fault(
        testing.check_bytes, cls("topk"), "num_bytes",
        lambda _: lambda self, spec, world_size: pack.num_bytes(6, self.packing(spec)) - 24, "topk",
    ),
    "bytes depend on the step": Fault(
        testing.check_bytes, cls("none"), "exchange", send_more_if(lambda x, ctx, work: ctx.step % 2), "none",
        {"feedback": "plain"},
    ),
    "collectives depend on the data": Fault(
        testing.check_collectives, cls("topk"), "exchange",
        send_more_if(lambda x, ctx, work: work.ops.max_abs(x) > 0), "topk",
    ),
    "global generator is reseeded": Fault(
        testing.check_deterministic, seed, "distinct_indices", reseed_global_generator, "randomk"
    ),
    "bad step is committed": Fault(testing.check_nonfinite, Exchange, "abandon", commit_bad_step, "topk"),
    "residual is written in place": Fault(testing.check_nonfinite, FEEDBACK, "receive", add_to_old_residual, "topk"),
    "steps are not restored": Fault(testing.check_resume, RankState, "load_state_dict", forget_steps, "scalecom"),
    "residual of rank 0 is loaded everywhere": Fault(
        testing.check_resume, testing.Trial, "saved", save_rank_0_for_all, "topk"
    ),
    "state_dict returns views": Fault(testing.check_resume, RankState, "state_dict", return_views, "topk"),
    "residual is kept scaled": Fault(
        testing.check_loss_scale, Exchange, "__init__", lambda init: lambda *args: init(*args[:6]), "topk"
    ),
    "damaged payload is decoded": Fault(
        testing.check_wire, pack, "decode", decode_damaged_bytes, "topk", message="index outside of the tensor"
    ),
    "damaged payload raises another error": Fault(
        testing.check_wire, wire, "check", raise_value_error, "topk", message="raised ValueError"
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_fault_is_noticed(monkeypatch: pytest.MonkeyPatch, fault: Fault) -> None:
    """The check passes without the fault, and raises with it."""
    density = {"density": 0.1} if "density" in hvdcompress.get_method(fault.method).hyperparameters() else {}
    method = hvdcompress.get_method(fault.method, **{**density, **fault.settings})
    sizes = {"world_sizes": (3,), "sizes": (1, 60), "steps": 4}
    check_method(method, ops=reference, checks=[fault.check], **sizes)
    monkeypatch.setattr(fault.owner, fault.attribute, fault.mutate(getattr(fault.owner, fault.attribute)))
    with pytest.raises(AssertionError, match=fault.message) as caught:
        check_method(method, ops=reference, checks=[fault.check], **sizes)
    # a crash of the mutant itself would prove nothing
    assert not isinstance(caught.value.__cause__, NameError | AttributeError | TypeError | KeyError), caught.value


@pytest.mark.parametrize("backend", testing.backends())
def test_writing_to_the_gradient_is_noticed_in_every_backend(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    monkeypatch.setattr(cls("none"), "exchange", double_gradient_in_place(None))
    with pytest.raises(AssertionError, match=r"read-only|input was changed"):
        check_method(
            hvdcompress.get_method("none"),
            world_sizes=(2,),
            checks=[testing.check_shapes],
            ops=testing.backends()[backend],
        )


def test_every_check_has_a_fault() -> None:
    assert {fault.check for fault in FAULTS.values()} == set(testing.CHECKS)


# -- mistakes in a first method, and their messages ----------------------------------------------------------------


def no_collective(self: Any, x: Any, state: Any, ctx: Any, work: Any) -> Any:
    return Reduced(total=x, own=x)


def yield_array(self: Any, x: Any, state: Any, ctx: Any, work: Any) -> Any:
    total = yield x
    return Reduced(total=total, own=x)


def return_pair(self: Any, x: Any, state: Any, ctx: Any, work: Any) -> Any:
    total = yield AllReduce(x)
    return total, x


def return_x_as_state(self: Any, x: Any, state: Any, ctx: Any, work: Any) -> Any:
    total = yield AllReduce(x)
    return Reduced(total=total, own=x, state={"last": x})


def return_no_state(self: Any, x: Any, state: Any, ctx: Any, work: Any) -> Any:
    total = yield AllReduce(x)
    return Reduced(total=total, own=x)


def slot(name: str) -> Callable[..., Any]:
    return lambda self, spec: {name: Slot((spec.size,))}


CODEC = {  # takes any payload
    "exchange": Method.exchange,
    "encode": lambda self, x, state, ctx, work: work.ops.to_bytes(x),
    "decode": lambda self, payload, ctx, work: work.ops.from_bytes(payload, "float32"),
}


@pytest.mark.parametrize(
    "edit,message",
    [
        ({"exchange": no_collective}, "never yields a collective"),
        ({"exchange": yield_array}, "yielded ndarray; it must yield AllReduce"),
        ({"exchange": return_pair}, "returned tuple, expected Reduced"),
        ({"exchange": return_x_as_state, "state": slot("last")}, "'residual' and 'last' share memory"),
        (
            {"exchange": return_no_state, "state": slot("last")},
            r"'last', but exchange\(\) returned no new value.*do not declare it",
        ),
        ({"state": slot("residual")}, "has the name of its error feedback's slot"),
        ({"num_bytes": Method.num_bytes}, "must define num_bytes"),
        ({"exchange": Method.exchange}, "must define exchange"),
        (CODEC, "damaged payload .* expected hvdcompress.parts.wire.WireError"),
    ],
)
def test_mistake_is_named(monkeypatch: pytest.MonkeyPatch, edit: dict[str, Any], message: str) -> None:
    method = hvdcompress.get_method("none", feedback="plain")
    for name, value in edit.items():
        monkeypatch.setattr(type(method), name, value)
    checks = [testing.check_wire] if edit is CODEC else testing.CHECKS
    with pytest.raises(AssertionError, match=message):
        check_method(method, world_sizes=(1,), checks=checks)


@pytest.mark.parametrize("name,value", [("level", 3), ("feedback", "lowpass")])
@pytest.mark.parametrize("annotation", ["str | int", None])
def test_a_field_must_have_a_type_annotation(name: str, value: Any, annotation: str | None) -> None:
    """A dataclass ignores a new field, and a new default of an inherited field, without its type."""
    body = {name: value, "__annotations__": {name: annotation} if annotation else {}, "__module__": __name__}
    method = registry.method(type("Later", (cls("none"),), body))()
    check = partial(check_method, method, world_sizes=(1,), checks=[testing.check_value])
    if annotation:
        check()
    else:
        with pytest.raises(AssertionError, match=rf"Later\.{name} has no type annotation.*Write `{name}: <type> = "):
            check()


def test_a_class_is_no_method() -> None:
    with pytest.raises(TypeError, match=r"pass Dense\(\)"):
        check_method(cls("none"))


def test_feedback_must_be_on_if_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cls("none"), "needs_feedback", True)
    with pytest.raises(AssertionError, match="feedback is off by default"):
        check_method(hvdcompress.get_method("none"), world_sizes=(1,))
