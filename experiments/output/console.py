"""The console of the command line; it is the same one as in the wheel."""

from hvdcompress.cli.console import console_of

__all__ = ["console_of"]
