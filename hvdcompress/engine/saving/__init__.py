"""Saved state: plain data by tensor, files on disk, and re-sharding for another number of ranks."""
