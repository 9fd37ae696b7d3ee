"""One host's part in a measurement of links: ``python stream.py HOSTS SECONDS`` prints bits per second."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time


def stream(count: int, seconds: float) -> float:
    """Send to the next host for some seconds, and return how many bits per second the previous one sent here.

    The first quarter is not counted: hosts do not start at the same moment, and TCP takes a while to find its speed.
    """
    number = int(socket.gethostname().removeprefix("host"))
    server = socket.create_server(("", 5001))
    deadline = time.monotonic() + 20
    while True:
        try:
            successor = socket.create_connection((f"host{(number + 1) % count}", 5001))
            break
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
    predecessor, _ = server.accept()
    received, first, began, block, buffer = 0, 0.0, time.monotonic(), bytes(1 << 18), bytearray(1 << 20)

    def send() -> None:
        with contextlib.suppress(OSError):
            while time.monotonic() < began + seconds + 0.2:  # a little longer, so that nobody waits for nothing
                successor.send(block)
        successor.close()

    threading.Thread(target=send, daemon=True).start()
    while (now := time.monotonic()) < began + seconds and (got := predecessor.recv_into(buffer)):
        if now > began + seconds / 4:
            received, first = (received + got, first) if first else (0, now)
    return 8 * received / max(1e-9, time.monotonic() - first)


if __name__ == "__main__":
    print(stream(int(sys.argv[1]), float(sys.argv[2])))
