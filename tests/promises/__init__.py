"""What every driver promises, each promise written once as a function of a *door* (``doors/``), a driver's adapter.

``PROMISES`` holds them by name, in the order of ``docs/promises.md``; ``table.py`` says which driver does not promise
what, and why. No framework is imported here, so that the table can be printed anywhere.
"""

# their promises register themselves, in this order
# isort: off
from promises import results, numbers, state, triggers, momentum, fallback  # noqa: F401
from promises import interactions, failures, agreement, accounts, cosine, traces  # noqa: F401
# isort: on

from promises.registry import PROMISES, Promise
from promises.table import DOORS, EXCEPTIONS, Exempt, keep

__all__ = ["DOORS", "EXCEPTIONS", "PROMISES", "Exempt", "Promise", "keep"]
