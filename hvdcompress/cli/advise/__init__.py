"""``hvdcompress advise``: measure on the user's own ranks whether a training gains by compression."""
