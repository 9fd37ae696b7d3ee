"""Questions between ranks outside of the training's network: a server thread, and a client function.

The server answers only peers that prove that they know the process's secret (the challenge of
``multiprocessing.connection``). After that, question and answer are one JSON message each. A peer that is silent for
``MESSAGE_TIMEOUT`` seconds is dropped. Each connection has its own thread, so a slow peer delays nobody else.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import struct
import threading
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

from hvdcompress.launchers import is_one_host, master_hosts

LOCALHOST = "127.0.0.1"  #: the server's address if all ranks are on one host
CONNECT_TIMEOUT = 1.0  #: seconds for connecting
MESSAGE_TIMEOUT = 3.0  #: seconds for each message of a peer
MAX_MESSAGE_BYTES = 1 << 16  #: bytes of a message, at most
REMOTE_ADDRESS = "192.0.2.1"  #: an address for documentation (RFC 5737); only used to find the default route

Message = dict[str, Any]


class AnswerServer:
    """Server that answers questions on a socket until it is closed.

    Args:
        answer: function from a question to its answer. If it raises an exception, the peer gets no answer.

    Attributes:
        endpoint: address, host name, port and secret. The ranks exchange their endpoints over the training's network.
        socket: the listening socket. A forked child closes its own copy; the parent continues to use the other one.
    """

    def __init__(self, answer: Callable[[Message], Any]):
        self._answer = answer
        secret = secrets.token_hex(16)
        host = own_address()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.socket = socket.create_server((host, 0), family=family, backlog=128)
        port = self.socket.getsockname()[1]
        self.endpoint: Message = {"host": host, "name": socket.gethostname(), "port": port, "secret": secret}
        threading.Thread(target=self._accept, name="hvdcompress-answers", daemon=True).start()

    def close(self) -> None:
        """Close the socket. Later connections are refused."""
        with contextlib.suppress(OSError):  # wakes the thread in accept()
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self.socket.accept()
            except ConnectionError:  # the peer has closed the connection already
                continue
            except OSError:
                return
            threading.Thread(target=self._serve, args=(peer,), name="hvdcompress-answer", daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        # What a dropped, silent or unauthenticated peer can cause, or a malformed question
        errors = OSError, EOFError, ValueError, LookupError, TypeError, AuthenticationError
        with contextlib.suppress(*errors), _connection(peer) as line:
            deliver_challenge(line, self.endpoint["secret"].encode())
            question = json.loads(line.recv_bytes(MAX_MESSAGE_BYTES))
            line.send_bytes(json.dumps(self._answer(question)).encode())


def query(endpoint: Message, question: Message) -> Any:
    """Ask the server at an endpoint and return its answer.

    Args:
        endpoint: the :attr:`AnswerServer.endpoint` of the peer.
        question: any JSON object.

    Raises:
        ConnectionRefusedError: the process has ended, or a firewall rejects connections.
        ConnectionError: the peer did not answer.
    """
    try:
        peer = socket.create_connection((endpoint["host"], endpoint["port"]), CONNECT_TIMEOUT)
        with _connection(peer) as line:
            answer_challenge(line, endpoint["secret"].encode())
            line.send_bytes(json.dumps(question).encode())
            return json.loads(line.recv_bytes(MAX_MESSAGE_BYTES))
    except ConnectionRefusedError:
        raise
    except (OSError, EOFError, ValueError, AssertionError, AuthenticationError) as error:
        raise ConnectionError("no answer") from error


def _connection(peer: socket.socket) -> Connection:
    """Wrap a socket in a connection whose reads and writes time out."""
    peer.setblocking(True)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        peer.setsockopt(
            socket.SOL_SOCKET, option, struct.pack("ll", int(MESSAGE_TIMEOUT), int(MESSAGE_TIMEOUT % 1 * 1e6))
        )
    return Connection(peer.detach())


def own_address() -> str:
    """Return the address at which other ranks can reach this host: that of the interface towards the master host.

    If the launcher reports that all ranks are on this host, it is :data:`LOCALHOST`.
    """
    if is_one_host():
        return LOCALHOST
    for host in [*master_hosts(), REMOTE_ADDRESS]:
        with contextlib.suppress(OSError):
            family, kind, _, _, there = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(there)  # selects the route; a UDP socket sends nothing
                if not (mine := probe.getsockname()[0]).startswith(("127.", "::1")):
                    return str(mine)
    with contextlib.suppress(OSError):
        return socket.gethostbyname(socket.gethostname())
    return LOCALHOST
