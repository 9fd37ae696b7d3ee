"""Plans: which method each tensor gets, with which hyper-parameters, from which step on.

A plan is written in YAML (or as a dict with the same keys)::

    method: scalecom            # the default method ...
    density: 0.01               # ... and its hyper-parameters, beside it
    beta: 0.1
    warmup: {epochs: 5}         # dense until then; or {steps: 500}
    schedule:                   # any hyper-parameter, by steps or by epochs
      density: {epochs: {0: 0.015625, 6: 0.004, 8: 0.001}}      # see schedule.py for another way
    steps_per_epoch: 391        # needed where epochs are spoken of
    min_elements: 1024          # smaller tensors go dense
    bucket_elements: 0          # tensors smaller than this are joined into buckets; 0: off
    seed: 0
    rules:                      # the first that matches a tensor wins
      - match: {name: "conv1.*"}            # a glob
        method: none
      - match: {ndim: 4, min_size: 100000}  # all given conditions must hold
        density: 0.004                      # no method: the default one, with this changed

Unknown keys, wrong types and values out of range are :class:`PlanError`, which names key and line.
"""

from hvdcompress.plan.document import PlanError
from hvdcompress.plan.plan import Bucket, Match, Plan, Program, Rule
from hvdcompress.plan.reading import load, plan_of

__all__ = ["Bucket", "Match", "Plan", "PlanError", "Program", "Rule", "load", "plan_of"]
