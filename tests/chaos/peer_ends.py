"""Run by two ranks: rank 1 ends with an error while rank 0 starts all-reduces, which must raise instead of hanging."""

from __future__ import annotations

import faulthandler
import itertools
import sys
import time
from pathlib import Path

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError

faulthandler.dump_traceback_later(30, exit=True)
out = Path(sys.argv[1])
hvd.init()
hvd.allreduce(torch.ones(8), name="both")
if hvd.rank() == 1:
    time.sleep(0.2)  # rank 0 has started thousands of all-reduces by then
    raise RuntimeError("raised on purpose")
try:
    for number in itertools.count():
        hvd.allreduce_async_(torch.ones(8), name=str(number))
except HorovodInternalError as error:
    (out / "error").write_text(str(error))
