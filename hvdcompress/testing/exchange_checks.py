"""Checks of the exchange itself: bytes, collectives, determinism, rollback, checkpoints, state and wire format."""

from __future__ import annotations

import copy
import itertools
import math
import random
from typing import Any

import numpy as np

from hvdcompress.engine.lockstep import to_numpy
from hvdcompress.method import Context, Method, Sparse, TensorSpec, Workspace
from hvdcompress.parts import feedback, seed
from hvdcompress.parts.wire import WireError
from hvdcompress.testing.trial import Array, Case, Kind, equal, require, same_arrays, same_states


def check_bytes(case: Case) -> None:
    """Check that the ledger counts the bytes that were really sent, and that they equal the method's ``num_bytes``."""
    net = case.trial()
    for n, dtype in itertools.product(case.sizes, ("float32", "float64", "float16")):
        name = f"{dtype}.{n}"
        (bucket,) = net.plan.buckets([TensorSpec(name, case.shape(n), dtype)])
        # Lengths may depend on the step even with one phase. They do not depend on the dtype
        for step in range(case.steps if len(case.method.phases) > 1 or dtype == "float32" else 1):
            before = [net.ledger.bytes_sent(rank) for rank in range(case.world_size)]
            method = bucket.program.main
            phase = net.ranks[0].next_step(bucket).phase
            state = net.ranks[0].states.get(name)
            rest = (phase, state.slots if state else None) if len(method.phases) > 1 else ()
            net.log.clear()
            net.allreduce([g.astype(dtype) for g in case.gradients(n, step)], name)
            formula = method.num_bytes(bucket.spec, case.world_size, *rest)
            hint = "; if lengths may differ between steps, set `variable_length = True`" if step else ""
            for rank in range(case.world_size):
                sent = net.ledger.bytes_sent(rank) - before[rank]
                payloads = sum(collective.num_bytes[rank] for collective in net.log)
                where = f"n = {n}, {dtype}, step {step}, rank {rank}"
                require(sent == payloads, f"{where}: the ledger has {sent} bytes, but the payloads have {payloads}")
                require(
                    sent == formula or (case.method.variable_length and sent < formula),
                    f"{where}: num_bytes() returns {formula}, but the payloads have {payloads} bytes{hint}",
                )


def check_collectives(case: Case) -> None:
    """Check that collectives and their dtypes depend on tensor, phase and world size, not on data, rank or step."""
    known: dict[tuple[int, int], list[tuple[str, str, str]]] = {}
    kinds: tuple[Kind, ...] = ("normal", "zero", "heavy")
    for n in case.sizes:
        for kind in kinds:
            net = case.trial(seed=case.seed + len(kind))
            for step in range(case.steps if kind == "normal" else 2):
                net.log.clear()
                net.allreduce(case.gradients(n, step, kind), "w")
                where = f"n = {n}, {kind}, step {step}"
                # The loopback raises if payloads do not fit together, such as sums of different lengths
                for one in net.log:
                    require(
                        one.collective == "AllReduce" or set(one.dtypes) == {"uint8"},
                        f"{where}, {one.collective}: the payloads are {', '.join(one.dtypes)}, not uint8",
                    )
                collectives = [(one.collective, one.op, one.dtypes[0]) for one in net.log]
                first = known.setdefault((n, case.method.phase_of(step)), collectives)
                require(collectives == first, f"{where}: the collectives are {collectives}, but were {first} before")


def check_deterministic(case: Case) -> None:
    """Check that the same seed gives the same bytes, and that the global random generators are not used."""
    before = np.random.get_state(), random.getstate()
    nets = [case.trial(), case.trial()]
    try:
        for step in range(case.steps):
            outs = []
            for number, net in enumerate(nets):
                np.random.seed(number)  # a different state of the global generators must not change the result
                random.seed(number)
                outs.append(net.allreduce(case.gradients(200, step), "w")[0])
                require(
                    np.random.random() == np.random.RandomState(number).random()
                    and random.random() == random.Random(number).random(),
                    f"step {step}: a global random generator was used; use parts/seed.py",
                )
            require(equal(*outs), f"step {step}: the same seed gave different results")
        require(nets[0].log == nets[1].log, "the same seed gave different payloads")
    finally:
        np.random.set_state(before[0])
        random.setstate(before[1])


def check_nonfinite(case: Case) -> None:
    """Check that a NaN or Inf on one rank gives NaN on all ranks, and does not change state or later steps."""
    for number, bad in enumerate((np.nan, np.inf, -np.inf)):
        rank = number % case.world_size
        net = case.trial()
        clean = case.trial()
        for step in range(case.steps):
            both = zip(case.gradients(60, step), case.gradients(33, 9 + step), strict=True)
            given = [{"a": a, "b": b} for a, b in both]
            if step:
                before = net.saved()
                broken = [{name: g.copy() for name, g in of_rank.items()} for of_rank in given]
                broken[rank]["b"][-1] = bad
                require(
                    all(np.isnan(array).all() for out in net.allreduce(broken) for array in out.values()),
                    f"{bad} in 'b' of rank {rank}: not all elements of all results are NaN on all ranks",
                )
                require(same_states(before, net.saved()), f"{bad} on rank {rank} at step {step} changed a state")
            require(
                same_arrays(net.allreduce(given), clean.allreduce(given)),
                f"{bad} at step {step}: the next step differs from the same step of a clean run",
            )
        require(same_states(net.saved(), clean.saved()), f"{bad}: the states differ from those of a clean run")


def check_resume(case: Case) -> None:
    """Check that a run continues from saved state with the same bits, and that saved state is a copy."""
    uninterrupted = case.trial()
    first = case.trial()
    second = case.trial()
    specs = [TensorSpec("v", (3, 5)), TensorSpec("w", case.shape(70))]

    def gradients(step: int) -> list[dict[str, Array]]:
        pairs = zip(case.gradients((3, 5), step), case.gradients(70, 50 + step), strict=True)
        return [{"v": v, "w": w} for v, w in pairs]

    for step in range(3):
        uninterrupted.allreduce(gradients(step))
        first.allreduce(gradients(step))
    saved = first.saved()
    untouched = copy.deepcopy(saved)
    for rank in range(case.world_size):  # if the saved arrays were views of live state, these steps would change them
        first.allreduce(gradients(77 + rank))
    require(same_states(saved, untouched), "saved state changed while the run continued")
    second.restore(saved, specs)
    for step in range(3, 6):
        require(
            same_arrays(uninterrupted.allreduce(gradients(step)), second.allreduce(gradients(step))),
            f"step {step}: resumed and uninterrupted runs differ",
        )
    require(
        same_states(uninterrupted.saved(), second.saved()),
        "resumed and uninterrupted runs end with different states",
    )
    require(same_states(saved, untouched), "the resumed run changed the arrays from which it was restored")


def check_loss_scale(case: Case) -> None:
    """Check that state is kept unscaled: a change of the loss scale only scales the result.

    A method without state may ignore the loss scale.
    """
    scale = 1.0
    has_state = bool(feedback.slots(case.method, TensorSpec("w", case.shape(90))))
    plain = case.trial()
    scaled = case.trial(loss_scale=lambda: scale)
    for step in range(case.steps):
        scale = float(2 ** (3 * step % 7))  # multiplying by a power of two is exact
        factor = np.float32(scale)
        given = case.gradients(90, step)
        multiplied = [g * factor for g in given]
        where = f"step {step}, loss scale {scale}"
        out = scaled.allreduce(multiplied, "w")[0]
        expected = plain.allreduce(given, "w")[0] * factor if has_state else plain.allreduce(multiplied, "w")[0]
        require(
            np.allclose(out, expected, rtol=case.rounding, atol=case.rounding * float(factor)),
            f"{where}: the result is {out[:3]}…, expected {expected[:3]}…",
        )
        for rank in range(case.world_size):
            require(
                np.allclose(plain.residual("w", rank), scaled.residual("w", rank), case.rounding, case.rounding),
                f"{where}: the residual of rank {rank} depends on the loss scale",
            )


def check_state(case: Case) -> None:
    """Check that the state has the declared slots, sizes and dtypes after every step, and that each slot is used."""
    n = 65
    net = case.trial()
    (bucket,) = net.plan.buckets([TensorSpec("w", case.shape(n))])
    method = bucket.program.main
    declared = feedback.slots(method, bucket.spec)
    first: list[dict[str, Array]] = []
    for step in range(case.steps):
        net.allreduce(case.gradients(n, step), "w")
        for number, rank in enumerate(net.ranks):
            state = rank.states["w"].slots
            require(
                state.keys() == declared.keys(),
                f"the state has the slots {sorted(state)}, but the method declares {sorted(declared)}",
            )
            if not step:
                first.append(dict(state))
            for slot, array in state.items():
                found = to_numpy(array)
                expected = declared[slot]
                require(
                    (found.size, str(found.dtype)) == (math.prod(expected.shape), expected.dtype),
                    f"step {step}, rank {number}: slot {slot!r} has {found.size} elements of {found.dtype}, but the "
                    f"method declares {expected}",
                )
    if {method.phase_of(step) for step in range(case.steps)} == set(range(len(method.phases))):
        for slot in method.state(bucket.spec):
            # The engine allocates zeros, and replaces the array only by one that exchange() returns
            returned = [
                rank.states["w"].slots[slot] is not begun[slot] or to_numpy(begun[slot]).any()
                for rank, begun in zip(net.ranks, first, strict=True)
            ]
            require(
                any(returned),
                f"state() of method {method.id!r} declares the slot {slot!r}, but exchange() returned no new value for "
                f"it in {case.steps} steps, so it stays zero. Return it in Reduced(state={{{slot!r}: …}}), do not "
                "declare it, or pass a larger `steps` if it changes later",
            )
    for rank in net.ranks:
        arrays = {slot: to_numpy(array) for slot, array in rank.states["w"].slots.items()}
        for (slot, array), (other, second) in itertools.combinations(arrays.items(), 2):
            require(
                not np.shares_memory(array, second),
                f"slots {slot!r} and {other!r} share memory; return a new array, neither x nor a view of it",
            )
    for slot, expected in declared.items():
        if expected.scope == "shared":
            copies = [to_numpy(rank.states["w"].slots[slot]).tobytes() for rank in net.ranks]
            require(len(set(copies)) == 1, f"slot {slot!r} is declared shared, but differs between ranks")


def check_wire(case: Case) -> None:
    """Check that a damaged payload raises ``WireError``, or decodes to indices and values that fit the tensor."""
    # With other routes, the pieces of an all-to-all have a fixed length and no header that could be damaged
    if type(case.method).decode is Method.decode or getattr(case.method, "route", "gather") != "gather":
        return
    shape = case.shape(120)
    net = case.trial()
    net.allreduce(case.gradients(shape), "w")
    payloads = [np.frombuffer(sent, np.uint8) for c in net.log if c.collective == "AllGather" for sent in c.sent]
    ctx = Context(0, case.world_size, 0, TensorSpec("w", shape), case.seed)
    ops = net.ops
    n = case.method.num_positions(ctx.spec)
    work = Workspace(ops)
    for payload in payloads[:2]:
        share = case.method.decode(ops.asarray(payload.copy(), like=payload), ctx, work)
        _require_fit(share, n, "an undamaged payload")
        hashes = seed.uniform(seed._key(case.seed, len(payload)), 90)
        for number, u in enumerate(hashes):
            damaged = payload.copy()
            position = int(u * len(damaged)) if len(damaged) else 0
            if number % 3 == 0:  # cut off
                damaged = damaged[:position].copy()
            elif number % 3 == 1:  # one bit flipped
                damaged[position] ^= np.uint8(1 << number % 8)
            else:  # bytes appended
                damaged = np.concatenate([damaged, damaged[:position]])
            try:
                share = case.method.decode(ops.asarray(damaged, like=damaged), ctx, work)
            except WireError:
                continue
            except Exception as error:
                raise AssertionError(
                    f"decode() of a damaged payload ({len(damaged)} bytes instead of {len(payload)}) raised "
                    f"{type(error).__name__}, expected hvdcompress.parts.wire.WireError: {error}"
                ) from error
            _require_fit(share, n, "a damaged payload")


def _require_fit(share: Any, n: int, what: str) -> None:
    """Raise AssertionError unless a decoded share fits a tensor of n elements (or n blocks of elements)."""
    if isinstance(share, Sparse):
        index = to_numpy(share.index)
        values = to_numpy(share.values)
        require(
            len(index) == len(values) or (len(index) and len(values) % len(index) == 0),
            f"{what} decodes to {len(index)} indices and {len(values)} values",
        )
        require(
            ((index >= 0) & (index < n)).all(), f"{what} decodes to an index outside of the tensor: raise WireError"
        )
    else:
        require(len(to_numpy(share)) == n, f"{what} decodes to {len(to_numpy(share))} elements instead of {n}")
