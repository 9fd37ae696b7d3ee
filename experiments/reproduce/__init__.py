"""The papers' claims, tested on real data by one command each: ``experiments reproduce gaussiank [--quick | --full]``.

A paper is a module with one :class:`~experiments.reproduce.claims.Paper`, a list of claims. To add a claim:

1. Write what is *measured*: a function at the top of a module, which takes plain data as keywords and returns plain
   data (both go through JSON). ``simulate.train`` trains a task with simulated ranks and shows it every step that it
   asks for. One call is a :class:`~experiments.reproduce.claims.Unit` of work: its result is kept on disk, so make
   it small, a seed and a setting; a minute is much. Claims that name the same unit share it.
2. Write what is *reported*: a function from all its units' results to a
   :class:`~experiments.reproduce.claims.Report`, a verdict with its number, tables and pictures.
   ``claims.judge`` makes the verdict from whether the rule was met, for each condition and seed.
3. Put both in a :class:`~experiments.reproduce.claims.Claim` with the paper's sentence in our words, and that in
   the paper's list. A new paper is also named in ``papers.py``.

``--claims S5`` measures a part of a page: it is written into the page that is in the folder, which may be a copy
of the one in docs/papers, and says by what.

Results are kept by the function's name and settings and the package's version. Who changes a measuring function during
development empties the folder ``cache`` next to the page.

``gaussiank.py`` with ``gaussiank_measures.py`` is the worked example. Reports share ``rows`` and figures ``pictures``;
``run`` measures and writes, ``cache`` keeps results, ``page`` makes the page and the summary of all papers.
"""
