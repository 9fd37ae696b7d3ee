"""Start DDP ranks without a launcher."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.installed import needs
from tests.launching import environment

FORKED = Path(__file__).with_name("forked.py")
Statuses = tuple[list[int], list[str]]


@pytest.fixture(scope="session")
def run_ddp() -> Iterator[Callable[..., Statuses]]:
    """A function that runs a script on ranks under DDP; torchrun would end all of them when one has failed.

    Its arguments are the number of ranks, a folder, the script and its further arguments; keywords go into the ranks'
    environment. It returns the exit statuses and the outputs of all ranks.
    """
    needs("torch")
    with subprocess.Popen(
        [sys.executable, FORKED], env=environment("alone"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin and process.stdout

        def run(world_size: int, out: Path, script: Path, *arguments: str, **more: str) -> Statuses:
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = str(free.getsockname()[1])
            shared = {"DRIVER": "ddp", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(world_size)}
            words = [str(script), str(out), *arguments]
            print(json.dumps([words, {**shared, **more}]), file=process.stdin, flush=True)
            status = json.loads(process.stdout.readline())
            return status, [(out / f"log-{rank}").read_text() for rank in range(world_size)]

        yield run
