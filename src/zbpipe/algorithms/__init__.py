"""A file per schedule, or for a few of one kind. Importing this package registers all: a new schedule is a new file.

F is the forward, I the input backward (dI), W the weight backward (dW), B both together.
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
