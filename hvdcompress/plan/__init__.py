"""Plans: assign methods and hyper-parameters to tensors and steps.

- reading: :func:`load_plan` and :func:`plan_of` create a :class:`Plan` from YAML, a dict or a method.
  :func:`load_plan` documents the format; :func:`settings_of` parses settings of a command line.
- plan: a :class:`Plan` has :class:`Rule` objects, each a :class:`Match` and a :class:`Program` (methods by step). It
  groups tensors into :class:`Bucket` objects, by the :class:`Grouping` of a network unless the plan says how.
- schedule: the keys ``warmup`` and ``schedule``, which create programs of several methods.
- document: YAML mappings that know their line numbers, for error messages.
"""

from hvdcompress.plan.document import PlanError
from hvdcompress.plan.plan import BY_NAME, IN_ORDER, Bucket, Grouping, Match, Plan, Program, Rule
from hvdcompress.plan.reading import load_plan, plan_of, settings_of

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
    "load_plan",
    "plan_of",
    "settings_of",
]
