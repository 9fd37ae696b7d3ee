"""The type of the keyword arguments of attach functions and Compressors, with which editors complete them.

``settings.pyi`` lists the keys; ``python docs/settings.py`` writes it from the registry and the plan.
"""

from typing import Any

Settings = dict[str, Any]
DriverSettings = dict[str, Any]
LocalStepsSettings = dict[str, Any]
