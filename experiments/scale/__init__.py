"""The cost of an exchange among many workers: model, fit and prediction; the ring all-reduce, written out."""
