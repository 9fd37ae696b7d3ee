"""What Horovod's timeline shows of a few steps, in a launch with ``HOROVOD_TIMELINE=DYNAMIC`` in its environment."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

from tests.ranks.checks import FOLDER

SECONDS = 20  #: that the timeline's thread has, to write what was done


def check_names(hvd: Any, run: Callable[[], object], names: set[str]) -> None:
    """The timeline of ``run`` shows these names; Horovod writes it on rank 0 alone."""
    file = FOLDER / "timeline.json"
    hvd.start_timeline(str(file))
    run()
    hvd.stop_timeline()
    shown: set[str] = set()
    deadline = time.monotonic() + SECONDS
    while hvd.rank() == 0 and not shown >= names:
        assert time.monotonic() < deadline, sorted(shown)
        time.sleep(0.1)
        text = file.read_text() if file.exists() else ""
        shown = set(re.findall(r'"process_name".*?"name": "([^"]*)"', text))
