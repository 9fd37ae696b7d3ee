"""Run by every rank of a launch: the promises of one driver, and the cases of that driver alone.

``python run_promises.py OUT [NAME…]`` with ``DRIVER`` in the environment; see ``harness.py`` for what is written. One
launch runs them all, as starting ranks costs seconds.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

from tests import harness
from tests.promises import PROMISES, keep

#: a driver's own cases: what its framework alone has
CASES = {
    "torch": ("torch_cases", "torch_refusals", "local_cases"),
    "ddp": ("ddp_cases", "fsdp_cases", "local_cases"),
    "tensorflow": ("tf_cases", "tf_graphs", "keras_cases"),
    "mpi": ("mpi_cases",),
}

#: (driver, launch) -> the cases that are tried there, where it is not all; see promises/table.py
CASE_SUBSETS: dict[tuple[str, str], tuple[str, ...]] = {
    ("tensorflow", "gloo-2"): ("eager_execution", "steps_in_a_loop_inside_one_function"),
    ("torch", "mpi-2x2"): ("a_process_set",),  # one of the same ranks as those between nodes
    ("ddp", "torchrun-2x2"): (
        "two_levels_through_shared_memory_and_without_it",
        "ddp_inside_nodes_and_local_steps_between_them",
    ),
    ("mpi", "mpirun-2x2"): ("owners_are_the_same_after_an_error", "nodes_that_do_not_fit_are_every_ranks"),
}


def driver_of(name: str, folder: Path) -> Any:
    """Return the driver of this name, on this rank."""
    module = importlib.import_module(f"tests.promises.drivers.{name}")
    classes = [one for one in vars(module).values() if isinstance(one, type) and vars(one).get("name") == name]
    return classes[0](folder)


def main() -> None:
    name = os.environ["DRIVER"]
    driver = driver_of(name, harness.OUT)
    for cases in CASES[name]:
        importlib.import_module(f"tests.launched.{cases}")
    promises = {name: lambda promise=promise: keep(promise, driver) for name, promise in PROMISES.items()}
    seconds = {name: promise.seconds for name, promise in PROMISES.items()}
    harness.run(
        driver.rank, driver.meet, {**promises, **harness.CASES}, lambda name: seconds.get(name, harness.SECONDS_A_CASE)
    )


if __name__ == "__main__":
    main()
