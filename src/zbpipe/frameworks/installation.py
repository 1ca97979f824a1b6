"""`zbpipe.install()`: torch's `get_schedule_class` learns zbpipe's names, and with it every framework that asks it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from difflib import get_close_matches
from types import ModuleType
from typing import Any

from torch.distributed.pipelining import schedules

from zbpipe import registry
from zbpipe.frameworks import automodel
from zbpipe.frameworks.faces import face_of
from zbpipe.registry import Traits
from zbpipe.runtime import arguments, job
from zbpipe.runtime.options import ForTorch, Options

_ABSTRACT = ("pipelineschedulesingle", "pipelineschedulemulti")
"""Names that torch answers with a class that is not a schedule; frameworks use them beside a CSV file of their own."""

logger = logging.getLogger(__name__)


class _Installation:
    """What stands in the place of torch's `get_schedule_class` while zbpipe is installed."""

    def __init__(self, schedule: str | None, everywhere: bool, options: Options) -> None:
        self.torchs = schedules.get_schedule_class
        self.replacement = self.get_schedule_class
        """The same object each time, to be found again."""
        self.asked: list[str] = []
        """The names that were asked for, each once."""
        self._schedule = schedule
        self._everywhere = everywhere
        self._options = options
        self._faces: dict[str, Any] = {}

    def get_schedule_class(self, schedule_name: str) -> Any:
        """The class for a schedule of torch's or zbpipe's, in any case, or for the path of a CSV file.

        Raises:
            ValueError: no such schedule, or options that are not made for it.
        """
        name = self._schedule if self._everywhere and self._schedule is not None else schedule_name
        traits = None if str(name).lower() in _ABSTRACT else registry.lookup(name)
        self._tell(schedule_name, name, traits)
        if traits is None or traits.source == "torch":
            automodel.restore()
            return self.torchs(name)
        automodel.adapt(traits)
        if traits.name not in self._faces:
            job.require_sense(traits, self._options, str)
            self._faces[traits.name] = face_of(traits, self._options)
        return self._faces[traits.name]

    def _tell(self, asked: str, name: str, traits: Traits | None) -> None:
        """Once for each name: frameworks ask several times."""
        if asked in self.asked:
            return
        self.asked.append(asked)
        is_torchs = traits is None or traits.source == "torch"
        logger.info(
            "the job asks for the schedule %s and gets %s's %s", asked, "torch" if is_torchs else "zbpipe", name
        )
        if is_torchs and (self._schedule is not None or self._options != Options()):
            told = f"schedule={self._schedule!r} and its options" if self._schedule else "the options"
            logger.warning(
                "the job asks for torch's own schedule %s, which it gets; %s of zbpipe.install do not reach it. Name"
                " one of zbpipe's in the job's config, or install with everywhere=True",
                asked,
                told,
            )


_installed: _Installation | None = None


def install(schedule: str | None = None, *, everywhere: bool = False, **options: Any) -> None:
    """Make zbpipe's schedules known to all code of this process that asks torch for a schedule by its name.

        zbpipe.install("ZBV")       # before or after the framework is imported, before it builds its pipeline

    From then on `torch.distributed.pipelining.schedules.get_schedule_class` also knows zbpipe's names, `Auto`, those
    that other packages registered, all in any case, and paths of CSV files. Modules that imported it before get the new
    one; the log names them. Frameworks place the stages right, because the classes that they get look as those of torch
    that they know (see `zbpipe.frameworks.faces`). torch's own names go on meaning torch's classes.

    Args:
        schedule: the one that the job is going to ask for, so that it and the options are checked here and now.
        everywhere: whether the job gets `schedule` whatever it asks for, because its own config cannot name it.
        options: what the framework does not pass on: `split_backward`, `defer_loss`, `defer_pp_recv`,
            `max_active_stages`, `unshard_lookahead`, `defer_reduce_grad_wait`, `max_outstanding_sends` (see
            `zbpipe.build_pipeline_schedule`), `memory_limit` (Auto), `profile_steps`, `costs_out`, `trace`,
            `trace_step`, `check_gradients`. What the framework gives goes before them.

    Raises:
        ValueError: an unknown schedule or option, or options that are not made for the schedule.

    Called again it replaces what was installed. `zbpipe.uninstall` takes it back.
    """
    install_with(_options(options), schedule, everywhere=everywhere)


def install_with(options: Options, schedule: str | None = None, *, everywhere: bool = False) -> None:
    """`install` with options that are together already.

    Raises:
        ValueError: an unknown schedule, or options that are not made for it.
    """
    global _installed  # noqa: PLW0603 -- torch's function is one for the whole process
    arguments.require_yes_or_no("everywhere", everywhere)
    if everywhere and schedule is None:
        raise ValueError("everywhere=True needs a schedule to give everywhere: install('ZBV', everywhere=True)")
    if schedule is not None:
        job.require_sense(registry.lookup(schedule), options, str)
    uninstall()
    _installed = _Installation(schedule, everywhere, options)
    found = _replace(_installed.torchs, _installed.replacement)
    logger.info("zbpipe.install: replaced torch's get_schedule_class in %s", ", ".join(found))


def uninstall() -> None:
    """Take back what `install` did, everywhere. Schedules that were built stay what they are."""
    global _installed  # noqa: PLW0603
    if _installed is None:
        return
    automodel.restore()
    found = _replace(_installed.replacement, _installed.torchs)
    _installed = None
    logger.info("zbpipe.uninstall: torch's get_schedule_class is back in %s", ", ".join(found))


def asked_for() -> tuple[str, ...]:
    """The schedules that the job has asked for since zbpipe was installed, as it wrote them."""
    return tuple(_installed.asked) if _installed is not None else ()


def _replace(old: Callable[..., Any], new: Callable[..., Any]) -> list[str]:
    """Put `new` wherever a module has `old`; the names of these modules."""
    places = list(_places(old))
    for module, name in places:
        setattr(module, name, new)
    return [module.__name__ for module, _ in places]


def _places(function: Callable[..., Any]) -> Iterator[tuple[ModuleType, str]]:
    """zbpipe's own modules keep torch's."""
    for module_name, module in list(sys.modules.items()):
        if module is None or module_name.partition(".")[0] == "zbpipe":
            continue
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is function:
                yield module, name


def _options(given: dict[str, Any]) -> Options:
    for_torch = {each.name for each in fields(ForTorch)}
    own = {each.name for each in fields(Options)} - {"for_torch"}
    for name in given.keys() - for_torch - own:
        near = get_close_matches(name, for_torch | own, n=1, cutoff=0)
        raise ValueError(
            f"zbpipe.install has no option {name!r}; did you mean {near[0]!r}? It takes:"
            f" {', '.join(sorted(for_torch | own))}"
        )
    values = {name: value for name, value in given.items() if name in own}
    return Options(**values, for_torch=ForTorch(**{name: given[name] for name in for_torch & given.keys()}))
