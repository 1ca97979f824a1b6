"""`zbpipe.install()`: torch's `get_schedule_class`, and so every framework that calls it, learns zbpipe's names.

Frameworks on torch's schedules give a rank one stage if the class is a `PipelineScheduleSingle`, else two or more, and
place the stages in a V if it is `ScheduleZBVZeroBubble`. So they get a proxy that looks like a class of torch. Calling
it builds the schedule with zbpipe's options.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
from abc import ABCMeta
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, cast

from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle, ScheduleZBVZeroBubble

from zbpipe.frameworks import automodel, job_schedule
from zbpipe.frameworks.options import Options, list_options
from zbpipe.runtime import checks
from zbpipe.runtime._torch import pipelining
from zbpipe.runtime.schedules import RegisteredSchedule
from zbpipe.schedule import registry
from zbpipe.schedule.ir import Placement
from zbpipe.schedule.registry import Algorithm

of_model: dict[str, Any] = {}
"""A plug's arguments for the schedule while the framework builds its pipeline."""


class Proxy(ABCMeta):
    """Proxy classes of a schedule. A proxy equals torch's class with the same placement."""

    algorithm: Algorithm
    options: Options

    def __call__(cls, *args: Any, **kwargs: Any) -> pipelining.PipelineSchedule:
        """Build the schedule. The arguments are those of torch's class."""
        torchs = cls.__bases__[0]
        names = list(inspect.signature(torchs).parameters)
        given = dict(zip(names, args, strict=False)) | kwargs
        stages, placement = checks.place_stages(given.pop(names[0], ()), cls.algorithm)
        n_microbatches, loss_fn = given.pop("n_microbatches", None), given.pop("loss_fn", None)
        job_schedule.require_size(cls.algorithm, cls.options, placement, n_microbatches, str)
        built = job_schedule.build(cls.algorithm, stages, n_microbatches, loss_fn, cls.options, **of_model | given)
        job_schedule.attach(built, cls.options)
        if isinstance(built, RegisteredSchedule):
            built.refuses_capture = True
        return built

    def __eq__(cls, other: object) -> bool:
        is_abstract = other in (PipelineScheduleSingle, PipelineScheduleMulti)
        return cls is other or (other is cls.__bases__[0] and not is_abstract)

    def __hash__(cls) -> int:
        return hash(cls.__bases__[0])


def proxy_of(algorithm: Algorithm, options: Options) -> type[pipelining.PipelineSchedule]:
    """The class that frameworks get for a schedule, with `options` in addition to the framework's arguments."""
    base = pipelining.torch_class(algorithm.name) if algorithm.source == "torch" else _nearest(algorithm)
    content = {"algorithm": algorithm, "options": options, "__module__": __name__}
    proxy = Proxy(algorithm.class_name, (base,), content)
    return cast(type[pipelining.PipelineSchedule], proxy)


def is_placed_by_frameworks(algorithm: Algorithm, placement: Placement) -> bool:
    """Whether frameworks that get the proxy class place the stages correctly."""
    ranks = placement.num_ranks
    if _nearest(algorithm) is ScheduleZBVZeroBubble:
        return placement == Placement.v(ranks, 2)
    return placement == Placement.loop(ranks, max(placement.num_stages // ranks, 1))


def _nearest(algorithm: Algorithm) -> type[pipelining.PipelineSchedule]:
    """The torch class for which frameworks place the stages as the schedule does, if any."""
    if algorithm.stages_per_rank == 1:
        return PipelineScheduleSingle
    table = algorithm.table
    is_v = algorithm.placement in ("v", "wave") or (table and table.placement == Placement.v(table.placement.num_ranks))
    return ScheduleZBVZeroBubble if is_v and algorithm.stages_per_rank == 2 else PipelineScheduleMulti


_ABSTRACT = ("pipelineschedulesingle", "pipelineschedulemulti")
"""Names of torch's abstract classes. Frameworks use them with their own CSV file."""

logger = logging.getLogger(__name__)


class _Installation:
    def __init__(self, schedule: str | None, everywhere: bool, options: Options, torchs_too: bool) -> None:
        self.torchs = schedules.get_schedule_class
        self.replacement = self.get_schedule_class
        """One object, so that `uninstall` finds it again."""
        self.asked: list[str] = []
        """Names that the job has asked for."""
        self._schedule = schedule
        self._everywhere = everywhere
        self._options = options
        self._torchs_too = torchs_too
        self._proxies_of_torchs = torchs_too and options != Options()
        self._proxies: dict[str, Any] = {}
        self._tables: dict[str, Algorithm] = {}
        """Content of each file at the job's first request, by path."""

    def get_schedule_class(self, schedule_name: str) -> Any:
        name = self._schedule if self._everywhere and self._schedule is not None else schedule_name
        algorithm = self.find_algorithm(name)
        self._log(schedule_name, name, algorithm)
        if algorithm is None or algorithm.source == "torch":
            automodel.restore()
            if algorithm is None or not self._proxies_of_torchs:
                return self.torchs(name)
        else:
            automodel.adapt(algorithm)
        if algorithm.name not in self._proxies:
            job_schedule.require_sense(algorithm, self._options, str)
            self._proxies[algorithm.name] = proxy_of(algorithm, self._options)
        return self._proxies[algorithm.name]

    def find_algorithm(self, name: str) -> Algorithm | None:
        if str(name).lower() in _ABSTRACT:
            return None
        algorithm = self._tables.get(name) or registry.resolve(name)
        if algorithm.table is not None:
            self._tables[name] = algorithm
        return algorithm

    def _log(self, asked: str, name: str, algorithm: Algorithm | None) -> None:
        """Log each name once, on the first rank, because frameworks ask several times."""
        if asked in self.asked:
            return
        self.asked.append(asked)
        is_torchs = algorithm is None or algorithm.source == "torch"
        if os.environ.get("RANK", "0") != "0" or (self._torchs_too and not is_torchs):
            return  # the plug for TorchTitan logs more
        logger.info(
            "the job asks for the schedule %s and gets %s's %s", asked, "torch" if is_torchs else "zbpipe", name
        )
        if is_torchs and not self._proxies_of_torchs and (self._schedule is not None or self._options != Options()):
            unused = f"schedule={self._schedule!r} and its options" if self._schedule else "the options"
            logger.warning(
                "the job asks for torch's own schedule %s and gets it; %s of zbpipe.install have no effect. Name one of"
                " zbpipe's schedules in the job's config, or install with everywhere=True",
                asked,
                unused,
            )


_installed: _Installation | None = None


def install(schedule: str | None = None, *, everywhere: bool = False, **options: Any) -> None:
    """Make zbpipe's schedules known to all code of this process that asks torch for a schedule by name.

        zbpipe.install("ZBV")       # before the framework builds its pipeline

    Then `torch.distributed.pipelining.schedules.get_schedule_class` also knows zbpipe's names, `Auto`, and the names
    that other packages have registered, all in any case, and paths of CSV files. Modules that have imported the
    function get the new one; the log names them. torch's names still give torch's own classes.

    Args:
        schedule: the job's schedule, to check its name and the options now.
        everywhere: whether the job gets `schedule` under any name, because its own config cannot name it.
        options: "Options of a job" in docs/options.md. The framework's own arguments take precedence.

    Raises:
        ValueError: an unknown schedule or option, or options that do not fit the schedule.

    A second call replaces the first. `zbpipe.frameworks.installation.uninstall` undoes it.
    """
    # The job's own trainer steps its optimizer.
    checks.require_known("zbpipe.install", options, {each.name for each in list_options(steps_optimizer=False)})
    install_with(Options(**options), schedule, everywhere=everywhere)


def install_with(
    options: Options, schedule: str | None = None, *, everywhere: bool = False, torchs_too: bool = False
) -> None:
    """`install` with an `Options`. With `torchs_too` they also apply to torch's own schedules."""
    global _installed  # noqa: PLW0603 -- torch's function is one for the whole process
    checks.require_yes_or_no("everywhere", everywhere)
    if everywhere and schedule is None:
        raise ValueError("everywhere=True needs a schedule: install('ZBV', everywhere=True)")
    if schedule is not None:
        job_schedule.require_sense(registry.resolve(schedule), options, str)
    uninstall()
    _installed = _Installation(schedule, everywhere, options, torchs_too)
    found = _replace(_installed.torchs, _installed.replacement)
    logger.info("zbpipe.install: replaced torch's get_schedule_class in %s", ", ".join(found))


def uninstall() -> None:
    """Undo `install`. Schedules that were built stay as they are.

    >>> from torch.distributed.pipelining import schedules
    >>> import zbpipe
    >>> zbpipe.install("ZBV")
    >>> schedules.get_schedule_class("zbv").__name__
    'ScheduleZBV'
    >>> zbpipe.frameworks.installation.uninstall()
    """
    global _installed  # noqa: PLW0603
    if _installed is None:
        return
    automodel.restore()
    _replace(_installed.replacement, _installed.torchs)
    _installed = None


def find_algorithm(name: str) -> Algorithm | None:
    """The schedule of that name; None for torch's abstract classes, which frameworks use with a CSV file. While zbpipe
    is installed, a file is read only once, because it may change while the job runs."""
    return (_installed or _Installation(None, False, Options(), False)).find_algorithm(name)


def list_asked() -> tuple[str, ...]:
    """Names of schedules that the job has asked for since `install`."""
    return tuple(_installed.asked) if _installed is not None else ()


def _replace(old: Callable[..., Any], new: Callable[..., Any]) -> list[str]:
    """Replace `old` by `new` in every module with a reference to it. Returns the modules' names."""
    places = list(_places(old))
    for module, name in places:
        setattr(module, name, new)
    return [module.__name__ for module, _ in places]


def _places(function: Callable[..., Any]) -> Iterator[tuple[ModuleType, str]]:
    """Each module outside zbpipe with a reference to `function`, and the reference's name."""
    for module_name, module in list(sys.modules.items()):
        if module is None or module_name.partition(".")[0] == "zbpipe":
            continue
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is function:
                yield module, name
