"""One file per schedule. Importing this package registers them all, so a new schedule is one new file.

F is the forward, I the input backward (dI), W the weight backward (dW), B both together.
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
