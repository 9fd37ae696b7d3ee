"""Find the variable to which a gradient belongs. Residuals are kept by the name of the variable.

Horovod passes only the gradient to ``compress``, and skips gradients that are None. The position of a gradient does not
identify its variable, because it changes in a graph that trains other variables. But Horovod's tape and optimizers call
``compress`` from a function ``allreduce_grads(grads, vars)``. While a graph is traced, this function is on the call
stack, and its local variables contain the gradient next to its variable.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import tensorflow as tf

#: Horovod's function that reduces a list of gradients, and its name after AutoGraph has converted it
_REDUCING = ("allreduce_grads", "tf__allreduce_grads")


class Names:
    """Names of the variables. A variable keeps the name that it got when a graph used it for the first time.

    Args:
        given: the names in the order of the variables; without names, a variable is called by its index: "0", "1", ….
    """

    def __init__(self, given: Sequence[str] | None):
        self.given = given
        self._known: dict[Hashable, str] = {}
        self._reduced: tuple[Any, set[int]] = ((), set())  # (list that is being reduced, indices that are done)

    def of_variable(self, gradient: tf.Tensor) -> str | None:
        """Return the name of the variable to which a gradient belongs; None if Horovod does not know the variable.

        Args:
            gradient: the gradient that Horovod is reducing.

        Raises:
            ValueError: there are more gradients than names.
        """
        found = _lists_of(gradient)
        if found is None:
            return None
        gradients, variables = found
        keys = list(_keys(variables))
        # Also name variables without a gradient in this graph, because another graph may train them. But the program
        # may have given names only for the variables that have gradients
        names_all = self.given is None or len(self.given) >= len(variables)
        for key, each in zip(keys, gradients, strict=True):
            if names_all or isinstance(each, tf.Tensor):
                self._name(key)
        return self._name(keys[self._position(gradients, gradient)])

    def _name(self, key: Hashable) -> str:
        if key not in self._known:
            number = len(self._known)
            if self.given is not None and number >= len(self.given):
                raise ValueError(
                    f"there are more gradients than the {len(self.given)} names that the Compressor was given: name "
                    "all variables, and make one Compressor for each model"
                )
            self._known[key] = str(number) if self.given is None else self.given[number]
        return self._known[key]

    def _position(self, gradients: Sequence[Any], gradient: tf.Tensor) -> int:
        """Return the index of a gradient in the list; the next one if several variables have the same gradient."""
        if self._reduced[0] is not gradients:
            self._reduced = (gradients, set())
        done = self._reduced[1]
        position = next(i for i, each in enumerate(gradients) if each is gradient and i not in done)
        done.add(position)
        if not any(isinstance(each, tf.Tensor) and i not in done for i, each in enumerate(gradients)):
            self._reduced = ((), set())  # all are done: let the graph be freed, and the list be reduced again
        return position


def _lists_of(gradient: tf.Tensor) -> tuple[Sequence[Any], Sequence[Any]] | None:
    """Return the lists of gradients and variables that Horovod is reducing, from its frame on the call stack.

    Returns None if Horovod is not reducing a list, or the list does not contain ``gradient``.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in _REDUCING and frame.f_globals.get("__name__") == "horovod.tensorflow":
            gradients = frame.f_locals.get("grads")
            variables = frame.f_locals.get("vars")
            if gradients is None or variables is None or len(gradients) != len(variables):
                return None
            return (gradients, variables) if any(each is gradient for each in gradients) else None
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _keys(variables: Sequence[Any]) -> Iterator[Hashable]:
    """Yield a key for each source of a tape, the same in every trace.

    A variable is identified by itself. A tensor is a new object in each trace, so it is identified by its index among
    the tensors. A variable that is in the list twice has two gradients, and a residual for each of them.
    """
    seen: Counter[Hashable] = Counter()
    for variable in variables:
        reference = variable.ref() if isinstance(variable, tf.Variable) else None
        yield reference, seen[reference]
        seen[reference] += 1
