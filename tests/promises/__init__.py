"""What every driver promises. A promise is a function, written once; it is given a driver of ``drivers/``.

``PROMISES`` holds them by name, in the order of ``docs/promises.md``; ``table.py`` says which driver does not promise
what, and why. No framework is imported here, so that the table can be printed anywhere.
"""

# their promises register themselves, in this order
# isort: off
from tests.promises import results, numbers, state, triggers, momentum, fallback  # noqa: F401
from tests.promises import interactions, failures, agreement, accounts, cosine, traces  # noqa: F401
# isort: on

from tests.promises.registry import PROMISES, Promise
from tests.promises.table import DRIVERS, EXCEPTIONS, Exempt, keep

__all__ = ["DRIVERS", "EXCEPTIONS", "PROMISES", "Exempt", "Promise", "keep"]
