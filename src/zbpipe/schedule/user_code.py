"""Users' files: modules that register schedules, functions in files, and text."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

SEPARATOR = ".py:"
_MOST_BYTES = 2**25
"""Far above the size of any table or cost file, because a device file may never end."""


NEEDS_TORCH = "needs torch, which is not installed: pip install 'torch>=2.11'"
"""The end of a sentence about a name or a command."""


def require_torch(program: str) -> None:
    if importlib.util.find_spec("torch") is None:
        sys.exit(f"{program} {NEEDS_TORCH}")


def import_modules(names: Iterable[str]) -> None:
    """Import modules that register schedules, also from the current folder. ValueError with a module's error."""
    for name in names:
        import_from_here()
        try:
            importlib.import_module(name)
        except Exception as error:
            raise ValueError(f"the module {name!r} cannot be imported: {type(error).__name__}: {error}") from error


def import_from_here() -> None:
    """Let imports find modules in the current folder, as with `python -m`."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)


def function_of(source: str) -> Any:
    """The function that `file.py:function` names. The file runs once, unless it is already imported."""
    path, _, function = source.rpartition(":")
    if not path.endswith(".py"):
        raise ValueError(f"{source!r} does not name a function: give file.py:function")
    module = _module(str(Path(path).resolve()))
    if not callable(found := getattr(module, function, None)):
        raise ValueError(f"{path} has no function {function!r}: give file.py:function")
    return found


@cache
def _module(path: str) -> ModuleType:
    for imported in list(sys.modules.values()):
        file = getattr(imported, "__file__", None)
        if isinstance(file, str) and Path(file).name == Path(path).name and Path(file).resolve() == Path(path):
            return imported
    name = f"_zbpipe_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, "the name ends with .py"
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ValueError(f"the file {path!r} cannot be run: {type(error).__name__}: {error}") from error
    return module


def read_text(path: str | Path) -> str:
    """The UTF-8 text of a file, without Excel's byte order mark. Raises OSError, or ValueError for other text."""
    with Path(path).open("rb") as file:
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise ValueError(f"it has more than {_MOST_BYTES >> 20} MiB, too much for a schedule or for costs")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 text: byte {error.start} is {data[error.start]:#04x}") from None
