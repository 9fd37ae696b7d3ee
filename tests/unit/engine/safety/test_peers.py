"""Questions between ranks: who gets an answer, how long a silent peer is waited for, and at which address."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest

from hvdcompress import launchers
from hvdcompress.engine.safety import peers


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[peers.AnswerServer]:
    """A server that returns each question as its answer."""
    monkeypatch.setattr(peers, "MESSAGE_TIMEOUT", 0.2)
    made = peers.AnswerServer(lambda question: question)
    yield made
    made.close()


def connect(server: peers.AnswerServer) -> socket.socket:
    """Return a connection to the server that sends nothing."""
    line = socket.create_connection((server.endpoint["host"], server.endpoint["port"]), 2)
    line.settimeout(5)
    return line


def received(line: socket.socket) -> bytes:
    """Return everything that is received until the connection is closed."""
    found = b""
    try:
        while data := line.recv(4096):
            found += data
    except ConnectionResetError:
        pass
    return found


def test_a_peer_without_the_secret_gets_no_answer(server: peers.AnswerServer) -> None:
    assert peers.query(server.endpoint, {"x": "secret"}) == {"x": "secret"}
    with pytest.raises(ConnectionError):
        peers.query({**server.endpoint, "secret": "guessed"}, {"x": "secret"})
    for text in (b"\n", b'{"x": "secret"}\n', b"\xff" * 99999):
        with connect(server) as line:
            line.sendall(text)
            assert b"secret" not in received(line)


def test_silent_peers_delay_nobody_and_are_dropped(server: peers.AnswerServer) -> None:
    silent = [connect(server) for _ in range(20)]
    began = time.monotonic()
    assert peers.query(server.endpoint, {"number": 3}) == {"number": 3}
    assert time.monotonic() - began < 10  # one after another, they would take 20 times MESSAGE_TIMEOUT
    for line in silent:
        with line:
            received(line)


def test_a_stopped_process_does_not_answer_and_does_not_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operating system accepts the connection on its behalf."""
    monkeypatch.setattr(peers, "MESSAGE_TIMEOUT", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        endpoint = {"host": "127.0.0.1", "port": stopped.getsockname()[1], "secret": "s"}
        with pytest.raises(ConnectionError, match="no answer"):
            peers.query(endpoint, {})


def test_a_closed_server_refuses_although_a_forked_child_still_runs(server: peers.AnswerServer) -> None:
    closed_in_child, closed = os.pipe()
    if (child := os.fork()) == 0:
        server.socket.close()
        os.write(closed, b"x")
        time.sleep(20)
    os.read(closed_in_child, 1)
    server.close()
    try:
        with pytest.raises(ConnectionRefusedError):
            peers.query(server.endpoint, {})
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_messages_are_not_unpickled(server: peers.AnswerServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """``Connection.recv`` would run any code that a message contains."""
    monkeypatch.setattr(Connection, "recv", lambda self: pytest.fail("it unpickles"))
    assert peers.query(server.endpoint, {"x": 1}) == {"x": 1}


HERE = "address of this host"


@pytest.mark.parametrize(
    "variables,address",
    [
        ({}, HERE),
        ({"MASTER_ADDR": HERE}, HERE),
        ({"MASTER_ADDR": "no-such-host.invalid"}, HERE),
        ({"OMPI_MCA_orte_hnp_uri": f"1.0;tcp://127.0.0.1,{HERE}:4711;tcp6://[fd00::2]:4712"}, HERE),
        ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}, HERE),
        ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, peers.LOCALHOST),  # all ranks are on this host
    ],
)
def test_own_address(variables: dict[str, str], address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the address of the interface towards the master host."""
    sizes = [name for each in launchers.LAUNCHERS for name in (each.local_size, each.world_size)]
    for name in [*launchers.MASTERS, *sizes]:
        monkeypatch.delenv(name, raising=False)
    here = peers.own_address()
    for name, value in variables.items():
        monkeypatch.setenv(name, value.replace(HERE, here))
    assert peers.own_address() == address.replace(HERE, here)
