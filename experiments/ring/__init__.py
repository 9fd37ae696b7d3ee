"""The ring all-reduce across MPI ranks: read ``algorithm.py``, then ``codecs.py``; ``run.py`` is the experiment.

``launch/ring.sh -n 4`` runs it.
"""
