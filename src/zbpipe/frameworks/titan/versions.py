"""Which TorchTitan is installed, and whether zbpipe knows it. Imports neither torch nor torchtitan."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path


@dataclass(frozen=True)
class Version:
    """A release of TorchTitan that zbpipe knows."""

    name: str
    releases: tuple[tuple[int, ...], tuple[int, ...]]
    """The first release, and the first one after the last."""
    torch: tuple[int, int]
    """The oldest torch that it runs on."""
    checkpointing: tuple[str, ...]
    """Its arguments for activation checkpointing, with {} for the kind."""

    def checkpoint(self, kind: str) -> list[str]:
        """Its arguments for activation checkpointing of this kind: "none", "selective" or "full"."""
        return [argument.format(kind) for argument in self.checkpointing]


def find_installed() -> Version:
    """The version of TorchTitan that an import would find; an ImportError with the way out if zbpipe cannot use it."""
    found, torch = _torchtitan_release(), version("torch")
    fitting = [_fitting()] if _fitting() else []
    titan = next((each for each in KNOWN if each.releases[0] <= _numbers(found) < each.releases[1]), None)
    if titan is None:
        known = " and ".join(each.name for each in KNOWN)
        way_out = ", or ".join([*fitting, "look for a newer zbpipe"])
        raise ImportError(f"this is torchtitan {found}, and zbpipe knows {known}: {way_out}")
    if _numbers(torch) < titan.torch:
        needed = ".".join(map(str, titan.torch))
        way_out = ", or ".join([*fitting, f"install torch {needed} or newer"])
        raise ImportError(f"torchtitan {found} needs torch {needed} or newer, and this is torch {torch}: {way_out}")
    return titan


def _fitting() -> str:
    """The command that installs the newest known TorchTitan for the installed torch; nothing if there is none."""
    torch = _numbers(version("torch"))
    return next((f"pip install torchtitan=={each.name}" for each in reversed(KNOWN) if each.torch <= torch), "")


def _torchtitan_release() -> str:
    """The release of a source tree on Python's path, else of the package that pip has installed."""
    spec = find_spec("torchtitan")
    if spec is None:
        raise ImportError(f"torchtitan is not installed: {_fitting() or 'install torch 2.11 or newer first'}")
    for folder in spec.submodule_search_locations or ():
        release = Path(folder).parent / "assets" / "version.txt"
        if release.is_file():
            return release.read_text().strip()
    try:
        return version("torchtitan")
    except PackageNotFoundError:
        return "of an unknown version"


def _numbers(release: str) -> tuple[int, ...]:
    """(2, 13, 0) for "2.13.0+cpu"; () if it is not a release."""
    digits = re.match(r"\d+(\.\d+)*", release)
    return tuple(map(int, digits[0].split("."))) if digits else ()


# The newest comes last.
KNOWN = (
    Version(
        "0.2.2",
        releases=((0, 2, 2), (0, 3)),
        torch=(2, 11),
        checkpointing=("--activation_checkpoint.mode", "{}"),
    ),
    Version(
        "0.3.0",
        releases=((0, 3), (0, 4)),
        torch=(2, 14),
        checkpointing=("activation-checkpoint:{}",),
    ),
)
