"""Doors: each driver behind one face, so that a promise is written once. ``base.py`` has the face."""
