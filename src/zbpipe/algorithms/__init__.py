"""One file per schedule. Importing this package registers them all, so a new schedule is one new file."""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
