"""A step that fails halfway on an ordered transport: the error of each rank, and the collectives it completes."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from hvdcompress.engine.agreement import PeerError
from hvdcompress.engine.exchange import ExchangeError
from hvdcompress.engine.safety.alarm import Alarm, AlarmTransport, Call, missing_calls

COMMON = None  #: the error that all ranks raise
KNOWN, MINE, OTHER = PeerError("known to all ranks"), ExchangeError("mine"), MemoryError("mine")
WRONG_INPUT = ValueError("a wrong input")


@pytest.mark.parametrize(
    "caught,own,reported,raised",
    [
        (Alarm(), None, [None], COMMON),  # another rank has failed
        (KNOWN, None, [], KNOWN),
        (KNOWN, WRONG_INPUT, [], WRONG_INPUT),
        (MINE, None, [MINE], COMMON),
        (OTHER, None, [OTHER], OTHER),
    ],
)
def test_an_error_is_reported_to_all_ranks_once(
    caught: Exception, own: Exception | None, reported: list[Exception | None], raised: Exception | None
) -> None:
    exchange = Mock(return_value=[("", [[]]), ("broken", [[]])])
    transport = Mock(alarms=Mock(exchange=exchange), parts=[], calls=[], ranks=[0, 1], rank=0)
    found = AlarmTransport.fail(transport, caught, own)
    if raised is COMMON:
        assert isinstance(found, PeerError) and "rank 1: broken" in str(found)
    else:
        assert found is raised
    assert [call.args[0] for call in exchange.call_args_list] == reported
    assert transport.join.call_count == len(reported)
    assert found.__cause__ in (None, MINE)


def test_a_failed_rank_completes_the_collectives_of_the_others() -> None:
    reduce = Call("all_reduce", "float32", 9, "sum", None, None)
    gather = Call("all_gather", "uint8", 5, "sum", None, (5, 7, 3))
    all_to_all = Call("all_to_all", "uint8", 6, "sum", (1, 2, 3), (1, 4, 0))
    begun = [[reduce, gather, all_to_all], [reduce], [reduce, gather]]
    assert missing_calls(begun, 0) == []
    gathered, exchanged = missing_calls(begun, 1)
    assert gathered.kind == "all_gather" and gathered.size == 7, "the length that the others expect of this rank"
    # Rank 0 expects 4 bytes from this rank, and sends it 2
    assert exchanged.kind == "all_to_all" and exchanged.size == 4
    assert (exchanged.send_lengths, exchanged.recv_lengths) == ((4, 0, 0), (2, 0, 0))
    assert [call.kind for call in missing_calls(begun, 2)] == ["all_to_all"]
