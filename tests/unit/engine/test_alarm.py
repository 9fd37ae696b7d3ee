"""A step that fails in the middle, where collectives go by order: who raises what, and what is made up."""

from __future__ import annotations

import pytest

from hvdcompress.engine.agreement import PeerError
from hvdcompress.engine.exchange import ExchangeError
from hvdcompress.engine.safety.alarm import Alarm, Call, common_error, missing_calls


class Transport:
    """Notes what it was called with."""

    def __init__(self) -> None:
        self.failed: list[Exception | None] = []

    def fail(self, error: Exception | None) -> Exception:
        self.failed.append(error)
        return PeerError("the same on every rank")


@pytest.mark.parametrize("caught", [Alarm(), PeerError("all know"), ExchangeError("mine"), MemoryError("mine")])
def test_each_error_is_ended_on_all_ranks_once(caught: Exception) -> None:
    transport = Transport()
    raised = common_error(transport, caught)
    if isinstance(caught, Alarm):  # another rank has failed
        assert transport.failed == [None] and str(raised) == "the same on every rank"
    elif isinstance(caught, PeerError):  # nobody waits
        assert not transport.failed and raised is caught
    elif isinstance(caught, ExchangeError):
        assert transport.failed == [caught] and isinstance(raised, PeerError) and raised.__cause__ is caught
    else:
        assert transport.failed == [caught] and raised is caught


def test_a_rank_whose_input_was_wrong_raises_its_own_error() -> None:
    mine = ValueError("a wrong input")
    assert common_error(Transport(), PeerError("rank 1: a wrong input"), mine) is mine


def test_what_others_have_begun_is_made_up_with_zeros() -> None:
    reduce = Call("all_reduce", "float32", 9, "sum", None, None)
    gather = Call("all_gather", "uint8", 5, "sum", None, (5, 7, 3))
    turned = Call("all_to_all", "uint8", 6, "sum", (1, 2, 3), (1, 4, 0))
    begun = [[reduce, gather, turned], [reduce], [reduce, gather]]
    assert missing_calls(begun, 0) == []
    made = missing_calls(begun, 1)
    assert [call.kind for call in made] == ["all_gather", "all_to_all"]
    assert made[0].size == 7, "as many as the others expect of this rank"
    # rank 0 expects 4 bytes of this rank, and sends it 2
    assert made[1].send_lengths == (4, 0, 0) and made[1].recv_lengths == (2, 0, 0) and made[1].size == 4
    assert [call.kind for call in missing_calls(begun, 2)] == ["all_to_all"]
