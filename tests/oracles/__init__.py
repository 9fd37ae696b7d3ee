"""Reference implementations that tests compare the library with."""
