"""Where a process answers other ranks, from threads of its own, and how it asks them.

A question is answered to those alone who prove that they were told the process's secret
(``multiprocessing.connection``'s challenge). What follows is JSON, one message each way. A peer that says nothing for
``MESSAGE_TIMEOUT`` seconds is left; each has a thread of its own, so it keeps nobody else waiting.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

LOCALHOST = "127.0.0.1"  #: the address where all ranks are on one host
CONNECT_TIMEOUT = 1.0  #: seconds that a connection may take
MESSAGE_TIMEOUT = 3.0  #: seconds that a peer may take for a message
MAX_MESSAGE_BYTES = 1 << 16  #: bytes of a message, at most

#: a host's variables that say how many ranks are on it, and how many there are
SIZE_VARIABLES = (
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE"),
    ("HOROVOD_LOCAL_SIZE", "HOROVOD_SIZE"),
    ("LOCAL_WORLD_SIZE", "WORLD_SIZE"),
    ("MPI_LOCALNRANKS", "PMI_SIZE"),
)
#: variables of launchers that contain the address of the host which the others know
MASTER_VARIABLES = ("MASTER_ADDR", "HOROVOD_GLOO_RENDEZVOUS_ADDR", "OMPI_MCA_orte_hnp_uri", "SLURM_LAUNCH_NODE_IPADDR")
REMOTE_ADDRESS = "192.0.2.1"  #: an address for documentation (RFC 5737), to which the default route leads

Message = dict[str, Any]
#: what a stranger's words, or silence, come to
CONNECTION_ERRORS = OSError, EOFError, ValueError, LookupError, TypeError, AuthenticationError


class Unreachable(ConnectionError):
    """A peer does not answer.

    Attributes:
        refused: nobody listens there any more, or a firewall says so.
    """

    def __init__(self, refused: bool):
        super().__init__("no answer")
        self.refused = refused


class AnswerServer:
    """Answers questions on a socket, until it is closed.

    Args:
        answer: returns the answer to a question. An exception means that there is none.

    Attributes:
        address: how others reach it; the ranks tell each other.
    """

    def __init__(self, answer: Callable[[Message], Any]):
        self._answer = answer
        secret = secrets.token_hex(16)
        host = own_address()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family, backlog=128)
        self.endpoint: Message = {"host": host, "port": self._socket.getsockname()[1], "secret": secret}
        threading.Thread(target=self._accept, name="hvdcompress-answers", daemon=True).start()

    def close(self) -> None:
        """Answer no more: who asks is refused."""
        with contextlib.suppress(OSError):  # it wakes the thread
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def close_in_child(self) -> None:
        """In a fork: the socket is the parent's."""
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except ConnectionError:  # a peer that has hung up already
                continue
            except OSError:
                return
            threading.Thread(target=self._serve, args=(peer,), name="hvdcompress-answer", daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        with contextlib.suppress(*CONNECTION_ERRORS), _connection(peer) as line:
            deliver_challenge(line, self.endpoint["secret"].encode())
            question = json.loads(line.recv_bytes(MAX_MESSAGE_BYTES))
            line.send_bytes(json.dumps(self._answer(question)).encode())


def query(address: Message, question: Message) -> Any:
    """Return the answer of whoever has this address.

    Raises:
        Unreachable: there is none.
    """
    try:
        peer = socket.create_connection((address["host"], address["port"]), CONNECT_TIMEOUT)
        with _connection(peer) as line:
            answer_challenge(line, address["secret"].encode())
            line.send_bytes(json.dumps(question).encode())
            return json.loads(line.recv_bytes(MAX_MESSAGE_BYTES))
    except (OSError, EOFError, ValueError, AssertionError, AuthenticationError) as error:
        raise Unreachable(isinstance(error, ConnectionRefusedError)) from error


@contextlib.contextmanager
def _connection(peer: socket.socket) -> Iterator[Connection]:
    """Context manager: the peer's socket as a connection, in which each read and write ends."""
    peer.setblocking(True)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        peer.setsockopt(
            socket.SOL_SOCKET, option, struct.pack("ll", int(MESSAGE_TIMEOUT), int(MESSAGE_TIMEOUT % 1 * 1e6))
        )
    with Connection(peer.detach()) as line:
        yield line


def own_address() -> str:
    """Return the address by which other ranks reach this host: that of the way to the master.

    It is :data:`LOCALHOST` where the launcher says that all ranks are on this host.
    """
    if any(os.environ.get(local, "-") == os.environ.get(all_) for local, all_ in SIZE_VARIABLES):
        return LOCALHOST
    known = [os.environ[name] for name in MASTER_VARIABLES if os.environ.get(name)]
    masters = [host for text in known for host in re.findall(r"tcp://([\d.,]+)", text) or [text]]
    for host in [one for text in masters for one in text.split(",")] + [REMOTE_ADDRESS]:
        with contextlib.suppress(OSError):
            family, kind, _, _, there = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(there)  # which sends nothing
                if not (mine := probe.getsockname()[0]).startswith(("127.", "::1")):
                    return str(mine)
    with contextlib.suppress(OSError):
        return socket.gethostbyname(socket.gethostname())
    return LOCALHOST
