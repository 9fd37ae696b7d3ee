"""Each driver behind the same methods (``base.py``), so that a promise is written once."""
