"""Emulated hosts, and launching ranks onto them."""
