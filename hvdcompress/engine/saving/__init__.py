"""State as plain data, by tensor: on disk, and re-sharded for another number of ranks."""
