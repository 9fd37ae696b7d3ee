"""Plans: which method each tensor gets, with which hyper-parameters, and from which step on.

- reading: :func:`load` and :func:`plan_of`, from YAML, a dict or a method to a :class:`Plan`. :func:`load` describes
  the format; :func:`settings_of` reads a command line's.
- plan: the result. A :class:`Plan` has :class:`Rule` s, each a :class:`Match` and a :class:`Program` (methods by step),
  and joins tensors into :class:`Bucket` s, by a network's :class:`Grouping` where it does not say how.
- schedule: ``warmup`` and ``schedule``, the keys that make a program of several methods.
- document: YAML mappings that know their line numbers, for errors.
"""

from hvdcompress.plan.document import PlanError
from hvdcompress.plan.plan import BY_NAME, IN_ORDER, Bucket, Grouping, Match, Plan, Program, Rule
from hvdcompress.plan.reading import load, plan_of, settings_of

__all__ = [
    "BY_NAME",
    "IN_ORDER",
    "Bucket",
    "Grouping",
    "Match",
    "Plan",
    "PlanError",
    "Program",
    "Rule",
    "load",
    "plan_of",
    "settings_of",
]
