"""The papers' claims, tested on real data: ``python -m experiments reproduce gaussiank [--quick]``.

Each paper is a folder with a ``claims.py``, whose ``PAPER`` lists its claims. To add a claim:

1. Write a *measure*: a function at the top of a module that takes plain data as keywords, a ``seed`` among them, and
   returns a record, or a list of records, of plain data. ``simulate.watch`` trains a task with simulated ranks and
   shows the measure the steps that it asks for.
2. Write a function that returns a list of
   :class:`~experiments.units.Unit`: one call of the measure each, such as one setting. Each is measured with
   every seed, and its results are kept on disk, so a minute per unit is long enough. Claims that list the same unit
   share its results.
3. Decorate the function that judges with ``@PAPER.claim("G6", text, units)``. It gets the records of all units as a
   data frame, with labels and seeds as columns, and returns a :class:`~experiments.papers.claims.Verdict`.
   ``claims.judge`` makes the outcome from whether the rule is met, per condition and seed. ``figure`` is its plot, if
   there is one: a figure of ``experiments.report.plots``, such as ``plots.lines(…)``.
4. Measure it: ``python -m experiments reproduce PAPER --claims G6 --quick`` prints the verdict and saves the plot.
5. Describe the test and the rule in ``docs/templates/papers/PAPER.md``.

A new paper is also named in ``page.PAPERS``. ``gaussiank`` is the example to copy.

To publish a measurement, copy its ``papers-PAPER.json`` to ``experiments/results`` and its pictures to ``docs/papers``,
and run ``python docs/build.py``. To measure one claim again, copy the published file into the output folder first.
"""
