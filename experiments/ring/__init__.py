"""The ring all-reduce across MPI ranks: read ``algorithm.py``, then ``codecs.py``.

``python -m experiments reproduce gradiveq --claims V4,V5`` times it with each codec.
"""
