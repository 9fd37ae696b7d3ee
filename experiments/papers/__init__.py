"""The papers' claims, tested on real data: ``python -m experiments reproduce gaussiank [--quick | --full]``.

Each paper is a folder with a ``claims.py``, whose ``PAPER`` lists its claims. To add a claim:

1. Write a *measure*: a function at the top of a module that takes plain data as keywords and returns a record, or a
   list of records, of plain data. ``simulate.train`` trains a task with simulated ranks and shows it the steps that it
   asks for.
2. Write a function from a :class:`~experiments.papers.claims.Scale` to a list of
   :class:`~experiments.papers.units.Unit`: one call of the measure each, such as one seed and one setting. A unit's
   result is kept on disk, so a minute per unit is long enough. Claims that list the same unit share its result.
3. Decorate the function that judges with ``@PAPER.claim("G6", …, units=…)``. It gets the records of all units as a data
   frame, with the units' labels as columns, and returns a :class:`~experiments.papers.claims.Verdict`.
   ``claims.judge`` makes the outcome from whether the rule is met, per condition and seed.

A new paper is also named in ``page.PAPERS``. ``gaussiank`` is the example to copy.

``run.py`` measures and writes ``papers-PAPER.json``; ``page.py`` makes the page from that file and nothing else. To
publish a measurement, copy its ``papers-PAPER.json`` to ``experiments/results`` and its pictures to ``docs/papers``,
and run ``python docs/build.py``. To measure one claim again, copy the published file into the output folder first.
"""
