"""What Primus (commit fd1eeab) gives to patches: the same names and signatures, and the same fate of their errors."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


@dataclass
class PatchContext:
    backend: str
    phase: str
    extra: dict[str, Any] = field(default_factory=dict)


def get_param(ctx: PatchContext, path: str, default: Any = None) -> Any:
    """From the parameters of the module, by a path with dots; what is missing or null is `default`."""
    found: Any = ctx.extra["module_config"].params
    for name in path.split("."):
        found = getattr(found, name, None)
        if found is None:
            return default
    return found


def get_args(ctx: PatchContext) -> Any:
    return ctx.extra["module_config"].params


Handler = Callable[[PatchContext], None]
registered: list[SimpleNamespace] = []
log: list[str] = []


def register_patch(  # with the parameters of Primus' own
    patch_id: str,
    *,
    description: str = "",
    backend: str | None = None,
    phase: str | None = None,
    condition: Callable[[PatchContext], bool] | None = None,
    priority: int = 50,
    backend_versions: Sequence[str] | None = None,
    primus_versions: Sequence[str] | None = None,
    tags: Sequence[str] | None = None,
) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        patch = {"id": patch_id, "handler": handler, "backend": backend, "phase": phase, "priority": priority}
        registered.append(SimpleNamespace(**patch))
        return handler

    return register


def run_patches(backend: str, phase: str, params: SimpleNamespace) -> None:
    """In the order of priority, then of registration. An error is logged, and the others run."""
    ctx = PatchContext(backend, phase, extra={"module_config": SimpleNamespace(params=params)})
    for patch in sorted(registered, key=lambda patch: patch.priority):
        if (patch.backend, patch.phase) != (backend, phase):
            continue
        try:
            patch.handler(ctx)
            log.append(f"applied {patch.id}")
        except Exception as error:
            log.append(f"failed {patch.id}: {error}")
