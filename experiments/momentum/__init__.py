"""Measure how an optimizer's momentum and error feedback work together: accuracy of small trainings, over seeds.

A gradient that waits in a residual and arrives later acts as momentum. With the optimizer's momentum on top, sparse
methods lose accuracy. This study trains each contender with and without that momentum and compares it with dense
training. All ranks are simulated in one process, so the study says nothing about speed. Run it with
``python -m experiments momentum run`` and ``report``; ``--help`` lists the options.
"""
