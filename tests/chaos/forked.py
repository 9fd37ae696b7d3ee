"""Start ranks as forks of one process, so that PyTorch, which takes seconds to import, is imported once.

Each line of the standard input is a launch in JSON: the script with its arguments, of which the first is a folder, and
variables for the ranks' environment. The answer is a line with the ranks' exit statuses. Each rank's output goes to
log-RANK in the folder.
"""

from __future__ import annotations

import json
import os
import runpy
import sys

import torch._dynamo  # noqa: F401  (DDP and optimizers import it when they are made)

import hvdcompress.ddp
import hvdcompress.local_steps
import hvdcompress.testing  # noqa: F401

for line in sys.stdin:
    words, environment = json.loads(line)
    ranks = []
    for number in range(int(environment["WORLD_SIZE"])):
        rank = os.fork()
        if rank == 0:
            log = os.open(f"{words[1]}/log-{number}", os.O_WRONLY | os.O_CREAT)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.environ.update(environment, RANK=str(number))
            sys.argv = words
            runpy.run_path(words[0], run_name="__main__")
            sys.exit()
        ranks.append(rank)
    print([os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks], flush=True)
