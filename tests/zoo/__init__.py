"""Small models, one for each way in which autograd and its users treat weights and gradients.

Products, views, checkpoints and Functions of any kind are generated: test_programs.
"""

from importlib import import_module

_MODULES = ("layers", "autograd", "pipelines")
CASES = tuple(case for name in _MODULES for case in import_module(f"zoo.{name}").CASES)
BY_NAME = {case.name: case for case in CASES}
assert len(BY_NAME) == len(CASES), "two models of one name"
