"""Which variable a gradient belongs to, by which its residual is kept.

Horovod gives ``compress`` a gradient and nothing else, and leaves out gradients that are None. A gradient's position is
therefore another one in a graph that trains other variables. But Horovod's tape and optimizers reduce in a function
``allreduce_grads(grads, vars)``, which is among the callers of ``compress`` while a graph is traced: there the gradient
is found next to its variable.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import tensorflow as tf

#: Horovod's function that reduces a list of gradients, and the one that AutoGraph makes of it
_REDUCING = ("allreduce_grads", "tf__allreduce_grads")


class Names:
    """The tensors' names: each variable keeps the name that it got when a graph was first given it.

    Args:
        given: the names, in the order of the variables; without them a name is a number, "0", "1", ….
    """

    def __init__(self, given: Sequence[str] | None):
        self.given = given
        self._known: dict[Hashable, str] = {}
        self._reduced: tuple[Any, set[int]] = ((), set())  # the list that is being reduced, and what of it is done

    def of_variable(self, gradient: tf.Tensor) -> str | None:
        """Return the name of the variable whose gradient Horovod is reducing; None if it does not know the variable."""
        found = _lists_of(gradient)
        if found is None:
            return None
        gradients, variables = found
        here = list(_keys(variables))
        # variables whose gradient does not come here have names, too, as it may later, unless there are too few names
        everyone = self.given is None or len(self.given) >= len(variables)
        for key, one in zip(here, gradients, strict=True):
            if everyone or isinstance(one, tf.Tensor):
                self._name(key)
        return self._name(here[self._position(gradients, gradient)])

    def of_ordinal(self, ordinal: int) -> str:
        """Return the name of the n-th gradient in a graph whose variable is not known."""
        return self._name((None, ordinal))

    def _name(self, key: Hashable) -> str:
        if key not in self._known:
            number = len(self._known)
            if self.given is not None and number >= len(self.given):
                raise ValueError(
                    f"there are more gradients than the {len(self.given)} names that the Compressor was given"
                )
            self._known[key] = str(number) if self.given is None else self.given[number]
        return self._known[key]

    def _position(self, gradients: Sequence[Any], gradient: tf.Tensor) -> int:
        """The gradient's position in the list. One tensor may be the gradient of several variables."""
        if self._reduced[0] is not gradients:
            self._reduced = (gradients, set())
        done = self._reduced[1]
        position = next(i for i, one in enumerate(gradients) if one is gradient and i not in done)
        done.add(position)
        if not any(isinstance(one, tf.Tensor) and i not in done for i, one in enumerate(gradients)):
            self._reduced = ((), set())  # the graph may be freed, and the list reduced once more
        return position


def _lists_of(gradient: tf.Tensor) -> tuple[Sequence[Any], Sequence[Any]] | None:
    """Return the gradients and variables that Horovod is reducing, if ``gradient`` is among them."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in _REDUCING and frame.f_globals.get("__name__") == "horovod.tensorflow":
            gradients = frame.f_locals.get("grads")
            variables = frame.f_locals.get("vars")
            if gradients is None or variables is None or len(gradients) != len(variables):
                return None
            return (gradients, variables) if any(one is gradient for one in gradients) else None
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _keys(variables: Sequence[Any]) -> Iterator[Hashable]:
    """By what each source of a tape is known: a variable by itself, a tensor, another one in each trace, by its place.

    A variable that is in the list twice has two gradients, with a residual each.
    """
    seen: Counter[Hashable] = Counter()
    for variable in variables:
        reference = variable.ref() if isinstance(variable, tf.Variable) else None
        yield reference, seen[reference]
        seen[reference] += 1
