"""The drivers, how they are launched, and what they do not promise: data for the tests and the documentation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.harness import Skip
from tests.promises.registry import PROMISES, Promise


@dataclass(frozen=True)
class DriverEntry:
    """A driver as the table shows it. ``launches``: how its ranks are started; "threads-N" are within one process.
    "2x2": two nodes of two ranks, which exchange with two levels."""

    title: str
    launches: tuple[str, ...]


DRIVERS = {
    "loopback": DriverEntry("Loopback", ("threads-2", "threads-3", "threads-2x2")),
    "torch": DriverEntry("PyTorch", ("mpi-2", "mpi-3", "mpi-4", "gloo-2", "mpi-2x2")),
    "ddp": DriverEntry("PyTorch DDP", ("torchrun-2", "torchrun-3", "torchrun-4", "torchrun-2x2")),
    "tensorflow": DriverEntry("TensorFlow", ("mpi-2", "mpi-3", "gloo-2")),
    "mpi": DriverEntry("MPI", ("alone", "mpirun-2", "mpirun-3", "mpirun-4", "mpirun-2x2")),
}

#: (driver, launch) -> the promises that are tried there, where it is not all: over Gloo, ranks that share cores are
#: slow, so TensorFlow tries there what between them uses every collective, and what fails
SUBSETS: dict[tuple[str, str], tuple[str, ...]] = {
    ("tensorflow", "gloo-2"): (
        "sums_are_the_loopbacks",
        "a_trigger_on_one_rank_restarts_all",
        "a_failure_in_the_first_round_is_every_ranks",
        "different_plans_are_one_message",
    ),
}

_SOME = (  # between them they use every collective, and what fails
    "sums_are_the_loopbacks",
    "many_tensors_in_any_order",
    "scalecoms_bytes_do_not_grow_with_the_ranks",
    "a_trigger_on_one_rank_restarts_all",
    "a_failure_in_the_first_round_is_every_ranks",
    "different_plans_are_one_message",
)

_OF_EVERY_METHOD = (  # of one exchange of each method and option
    "results_are_the_loopbacks",
    "residuals_are_the_loopbacks",
    "bytes_are_the_loopbacks",
    "ranks_get_the_same_bits",
)

_WITH_TWO_LEVELS = (  # of what the ranks of a node do for each other
    "a_trigger_on_one_rank_restarts_all",
    "another_number_of_ranks_takes_over",
    "verify_every_names_the_state_that_differs",
)

_NODES = ("owners_are_the_same_after_an_error", "nodes_that_do_not_fit_are_every_ranks")  #: cases of the MPI driver

#: (driver, launch) -> the promises and cases that are tried there without --slow, where it is not all: another launch
#: of the driver tries the others, on other numbers of ranks
QUICK: dict[tuple[str, str], tuple[str, ...]] = {
    ("loopback", "threads-2x2"): (*_WITH_TWO_LEVELS, "all_features_at_once", "what_one_sees_is_the_ledgers"),
    ("loopback", "threads-3"): (  # of every method, three ranks of MPI are tried
        *_SOME,
        "another_number_of_ranks_takes_over",
        "odd_shapes_go_through",
    ),
    ("torch", "mpi-3"): (),
    ("torch", "mpi-4"): (),
    ("torch", "mpi-2x2"): (),  # MPI and DDP try two levels
    ("torch", "gloo-2"): SUBSETS[("tensorflow", "gloo-2")],
    ("ddp", "torchrun-3"): (),
    ("ddp", "torchrun-4"): (),
    ("ddp", "torchrun-2x2"): (
        *_WITH_TWO_LEVELS,
        "two_levels_through_shared_memory_and_without_it",
        "ddp_inside_nodes_and_local_steps_between_them",
    ),
    ("tensorflow", "mpi-3"): (),
    ("tensorflow", "gloo-2"): (),
    ("mpi", "alone"): (*_SOME, "results_are_the_loopbacks", "state_is_restored_to_the_bit"),
    ("mpi", "mpirun-3"): (*_SOME, *_OF_EVERY_METHOD, "another_number_of_ranks_takes_over", "odd_shapes_go_through"),
    ("mpi", "mpirun-4"): (),
    ("mpi", "mpirun-2x2"): (*_WITH_TWO_LEVELS, "sums_are_the_loopbacks", *_NODES),
}


@dataclass(frozen=True)
class Exempt:
    """Why a driver does not promise something. ``refused``: words with which every rank refuses it; without them it is
    not tried."""

    reason: str
    refused: tuple[str, ...] = ()


_OWN_GRAPHS = "each gradient has a graph of its own"
_ONE_OBJECT = "one object holds all ranks"
_LIKE_PARAMETERS = "gradients are made by the framework, like what they are of"
_AVERAGES = "DDP averages, and does nothing else"
_NO_PARAMETERS = "it is given no parameters: shared state and steps are compared"
_PROBE = "ranks tell each other no more than fits into a probe with each tensor"

EXCEPTIONS: dict[tuple[str, str], Exempt] = {
    **{
        (driver, promise): Exempt(reason)
        for driver, reason in (
            ("loopback", "all ranks are in one process, so there is nothing to gain"),
            ("tensorflow", "a graph has the collectives of the plan's methods; a warning says so"),
        )
        for promise in (
            "compression_is_given_up_where_it_does_not_pay",
            "compression_is_kept_where_it_pays",
            "uncompressed_steps_are_clipped_too",
        )
    },
    ("loopback", "summary_says_what_a_step_takes"): Exempt("one process does the work of all ranks"),
    ("loopback", "bfloat16_goes_through"): Exempt("numpy has no bfloat16"),
    ("loopback", "different_plans_are_one_message"): Exempt(f"{_ONE_OBJECT}: there is one plan"),
    ("loopback", "different_names_are_one_message"): Exempt(f"{_ONE_OBJECT}: a ValueError, once"),
    ("loopback", "different_shapes_are_one_message"): Exempt(f"{_ONE_OBJECT}: a ValueError, once"),
    ("loopback", "what_was_discarded_on_one_rank_alone_is_said"): Exempt(f"{_ONE_OBJECT}, and their steps"),
    ("loopback", "different_steps_are_one_message"): Exempt(f"{_ONE_OBJECT}, and their steps"),
    ("loopback", "different_loss_scales_are_one_message"): Exempt(f"{_ONE_OBJECT}: there is one loss scale"),
    ("loopback", "verify_every_names_the_parameter_that_differs"): Exempt(_NO_PARAMETERS),
    ("loopback", "different_operations_are_one_message"): Exempt(f"{_ONE_OBJECT}: there is one operation"),
    ("mpi", "bfloat16_goes_through"): Exempt("numpy has no bfloat16"),
    ("mpi", "verify_every_names_the_parameter_that_differs"): Exempt(_NO_PARAMETERS),
    ("mpi", "states_of_other_tensors_are_refused"): Exempt(
        "tensors become known as they come: what is loaded of others waits for them"
    ),
    ("torch", "a_wrong_input_at_a_later_step"): Exempt(_LIKE_PARAMETERS),
    ("torch", "a_failure_in_a_later_round_is_every_ranks"): Exempt(
        "ranks agree once in a step, before they wait: one that fails later raises alone, and Horovod ends the others"
    ),
    ("torch", "different_operations_are_one_message"): Exempt(
        "Horovod compares the ranks' operations itself", refused=("Mismatched",)
    ),
    ("ddp", "a_wrong_input_at_a_later_step"): Exempt(_LIKE_PARAMETERS),
    ("ddp", "sums_are_the_loopbacks"): Exempt(_AVERAGES),
    ("ddp", "different_operations_are_one_message"): Exempt(_AVERAGES),
    ("ddp", "different_names_are_one_message"): Exempt(
        "DDP compares the number of parameters itself; other names are one message", refused=("same model",)
    ),
    ("ddp", "different_shapes_are_one_message"): Exempt("DDP compares shapes itself, when it is made"),
    ("tensorflow", "a_wrong_input_at_a_later_step"): Exempt(_LIKE_PARAMETERS),
    ("tensorflow", "different_operations_are_one_message"): Exempt(
        "Horovod compares the ranks' operations itself", refused=("Mismatched",)
    ),
    ("tensorflow", "buckets_join_small_tensors"): Exempt(_OWN_GRAPHS, refused=("bucket_elements", _OWN_GRAPHS[5:])),
    ("tensorflow", "one_threshold_for_all_tensors"): Exempt(_OWN_GRAPHS, refused=("scope: global", "scope: tensor")),
    ("tensorflow", "a_nan_on_one_rank_undoes_the_whole_step"): Exempt(f"{_OWN_GRAPHS}: only that tensor is undone"),
    ("tensorflow", "a_failure_undoes_the_whole_step"): Exempt(f"{_OWN_GRAPHS}: only that tensor is undone"),
    ("tensorflow", "a_failure_in_a_later_round_is_every_ranks"): Exempt(
        "the flag of an error goes with the first collective: the rank raises alone, and its end is the others'"
    ),
    ("tensorflow", "the_message_is_one_and_names_the_cause"): Exempt(f"{_PROBE}: the others name the rank that failed"),
    ("tensorflow", "different_shapes_are_one_message"): Exempt(f"{_PROBE}: shapes are not compared"),
    ("tensorflow", "what_was_discarded_on_one_rank_alone_is_said"): Exempt(f"{_PROBE}: steps are not compared"),
    ("tensorflow", "steps_in_a_pause_are_averages_and_leave_no_trace"): Exempt(
        "a graph has the collectives of the plan's methods", refused=("cannot pause",)
    ),
    ("tensorflow", "different_steps_are_one_message"): Exempt(f"{_PROBE}: steps are not compared"),
    ("tensorflow", "verify_every_names_the_parameter_that_differs"): Exempt(
        f"{_PROBE}: nothing is compared", refused=("verify_every must be 0",)
    ),
    ("tensorflow", "verify_every_names_the_state_that_differs"): Exempt(
        f"{_PROBE}: nothing is compared", refused=("verify_every must be 0",)
    ),
    ("tensorflow", "summary_says_what_a_step_takes"): Exempt(f"{_OWN_GRAPHS}: it does not see where a step ends"),
    ("tensorflow", "cosine_every_compares_and_changes_nothing"): Exempt(
        _OWN_GRAPHS, refused=("cosine_every must be 0",)
    ),
    ("tensorflow", "different_loss_scales_are_one_message"): Exempt(f"{_PROBE}: loss scales are not compared"),
}

#: (driver, promise) -> why it is not promised with two levels
WITH_TWO_LEVELS: dict[tuple[str, str], Exempt] = {
    **{
        (driver, "gradients_are_taken_in_as_they_come"): Exempt("the ranks of a node are added up first")
        for driver in DRIVERS
    },
    ("loopback", "the_ledger_counts_what_is_given"): Exempt("collectives are counted by node, not by rank"),
}


def names_in(driver: str, launch: str) -> list[str]:
    """The promises that are tried in a launch of a driver."""
    return list(SUBSETS.get((driver, launch), PROMISES))


def is_slow(driver: str, launch: str, name: str) -> bool:
    """Whether a promise or a case is tried in a launch only with --slow."""
    return name not in QUICK.get((driver, launch), (name,))


def keep(promise: Promise, driver: Any) -> None:
    """Check that a driver keeps a promise, or refuses it as the table says.

    Raises:
        Skip: it is not promised, or needs more ranks.
        AssertionError: it is not kept.
    """
    if driver.world_size < promise.ranks:
        raise Skip(f"needs {promise.ranks} ranks")
    known = {**EXCEPTIONS, **WITH_TWO_LEVELS} if driver.nodes else EXCEPTIONS
    exempt = known.get((driver.name, promise.name))
    if exempt is None:
        promise.check(driver)
    elif exempt.refused:
        driver.must_raise(Exception, list(exempt.refused), lambda: promise.check(driver), same=False)
    else:
        raise Skip(exempt.reason)
