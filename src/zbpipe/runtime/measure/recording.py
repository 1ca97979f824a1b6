"""Records of a pipeline step: this rank's time of each op, and the memory that the ops allocated and kept.

`watch` shows training steps to a watcher. An unwatched step runs without hooks.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import starmap
from typing import Any, NamedTuple, cast
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor

from zbpipe.runtime._torch import autograd, collectives, compiler, hooks, on_meta, pipelining
from zbpipe.runtime._torch.attributes import replaced
from zbpipe.runtime.device import find_device, seconds_between
from zbpipe.schedule.ir import Op, OpKind
from zbpipe.simulator.timeline import Span


class Wanted(Enum):
    """A watcher's wish for the next step."""

    NOTHING = 0
    STEP = 1
    """Nothing but a run in the watcher's context."""
    TIMES = 2
    MEMORY = 3
    """Bytes that ops allocate, at the peak and at the end. On the CPU this distorts times."""
    WAITS = 4
    """Times, also of waits for collectives in eager modules. As with `MEMORY`, no products run in these waits."""


@dataclass(frozen=True)
class StepRecord:
    """One step on this rank. Times are in seconds since all ranks of the pipeline had reached the step."""

    schedule: str
    seconds: float
    """Time when this rank had run all its actions."""
    spans: tuple[Span, ...]
    """Ops in the order of their runs. The loss is part of the last stage's F."""
    kept: Mapping[Op, int]
    """Bytes that one F and one I of each stage allocated and kept, if requested; negative if they freed more."""
    most: Mapping[Op, int]
    """Peak bytes that one op of each kind and stage had allocated and not freed, if requested."""
    message_bytes: int
    """Largest message per microbatch that this rank sends forward; 0 if it has only the last stage."""
    waits: Mapping[Op, float] = field(default_factory=dict)
    """Seconds in which each op waited for collectives; 0 if not requested."""
    is_typical: bool = True
    """False for a step whose microbatches all had one shape that is not the usual one."""

    @property
    def num_microbatches(self) -> int:
        return 1 + max(span.op.microbatch for span in self.spans)


class Watcher:
    """Looks at training steps. All ranks of a pipeline need the same watchers, in the same order."""

    def before(self) -> Wanted | None:
        """Data wanted of the step that begins now, the same on all ranks. None: nothing more, also of later steps."""
        raise NotImplementedError

    def around(self, schedule: Any) -> AbstractContextManager[None]:
        """The context of a watched step."""
        return nullcontext()

    def after(self, record: StepRecord) -> None:
        """Called after a step with wanted times or memory."""

    def missed(self) -> None:
        """Called instead of `after` if the step was refused or failed. The next step replaces it."""


def watch(schedule: pipelining.PipelineSchedule, watcher: Watcher) -> None:
    _watchers_of(schedule).append(watcher)


def collect(
    schedule: pipelining.PipelineSchedule, wanted: Sequence[Wanted], done: Callable[[list[StepRecord]], None]
) -> None:
    """Call `done` once with the records of the next training steps of `schedule` (of zbpipe or torch)."""
    # `wanted` has one entry per step. The last one wants data.
    watch(schedule, Collector(wanted, done))


def _watchers_of(schedule: pipelining.PipelineSchedule) -> list[Watcher]:
    if "_watchers" not in vars(schedule):
        # No cycle: a schedule that lives until the interpreter ends keeps its process groups alive.
        watched = ref(schedule)
        vars(schedule).update(_watchers=[], step=lambda *args, **kwargs: _step(watched(), *args, **kwargs))
    watchers: list[Watcher] = vars(schedule)["_watchers"]
    return watchers


class Collector(Watcher):
    """See `collect`. Only typical steps count."""

    def __init__(self, wanted: Sequence[Wanted], done: Callable[[list[StepRecord]], None]) -> None:
        self._coming = deque(wanted)
        self._wanted: Wanted | None = None
        self.records: list[StepRecord] = []
        self._done = done

    def before(self) -> Wanted | None:
        self._wanted = self._coming.popleft() if self._coming else None
        return self._wanted

    def missed(self) -> None:
        if self._wanted is not None:
            self._coming.appendleft(self._wanted)

    def after(self, record: StepRecord) -> None:
        if not record.is_typical:
            self.missed()
            return
        self.records.append(record)
        if not self._coming:
            self._done(self.records)


def _step(schedule: Any, *args: Any, **kwargs: Any) -> Any:
    step = type(schedule).step.__get__(schedule)
    if not pipelining.trains(schedule):
        return step(*args, **kwargs)
    watchers = _watchers_of(schedule)
    asked = [(watcher, wanted) for watcher in watchers if (wanted := watcher.before()) is not None]
    watchers[:] = [watcher for watcher, _ in asked]
    looking = [(watcher, wanted) for watcher, wanted in asked if wanted is not Wanted.NOTHING]
    recorded = {wanted for _, wanted in looking} - {Wanted.STEP}
    recorder = _Recorder(schedule, recorded) if recorded else None
    if isinstance(schedule, pipelining.OwnRuntime) and looking:
        schedule.finish_optimizer_step()  # otherwise the record could include void actions
    try:
        if looking and find_device(pipelining.device_of_rank(schedule)).is_capturing():
            raise ValueError(
                "a CUDA graph cannot capture a step that is measured or checked: capture one after Auto has measured,"
                " and after profiles, traces and GradientCheck"
            )
        with ExitStack() as around:
            if recorder is not None:
                around.enter_context(recorder.attach())
            for watcher, _ in looking:
                around.enter_context(watcher.around(schedule))
            result = step(*args, **kwargs)
    except BaseException:
        for watcher, _ in asked:
            watcher.missed()
        raise
    if recorder is not None:
        record = recorder.record()
        for watcher, wanted in looking:
            if wanted is not Wanted.STEP:
                watcher.after(record)
    return result


class _Recorder:
    def __init__(self, schedule: pipelining.PipelineSchedule, wanted: Set[Wanted]) -> None:
        self._schedule = schedule
        self._own = cast(Any, schedule) if isinstance(schedule, pipelining.OwnRuntime) else None
        self._name = self._own.schedule.name if self._own else type(schedule).__name__.removeprefix("Schedule")
        stages = pipelining.stages_of(schedule)
        stage, modules = stages[0], (each for own in stages for each in own.submod.modules())
        self._group, self._last_stage = stage.group, stage.num_stages - 1
        device = pipelining.device_of(stage)
        self._device = find_device(device)
        self._allocated = MemoryCounter(device) if Wanted.MEMORY in wanted else None
        self._filler = getattr(schedule, "waits", None) if wanted & {Wanted.MEMORY, Wanted.WAITS} else None
        self._follow_waits: Callable[[], AbstractContextManager[list[Any]]] = lambda: nullcontext([])
        if Wanted.WAITS in wanted and not any(map(compiler.is_compiled, modules)):
            self._follow_waits = partial(collectives.marking_waits, self._device.mark)
        self._waits = defaultdict[Op, list[tuple[torch.Event, torch.Event]]](list)
        self._watched: dict[tuple[int, OpKind], Op] = {}
        """The op whose memory is measured, by stage and kind, because not all microbatches have all kinds."""
        self._marks: dict[Op, tuple[torch.Event, torch.Event]] = {}
        self._message_bytes = 0

    @contextmanager
    def attach(self) -> Iterator[None]:
        if dist.get_world_size(self._group) > 1:
            dist.barrier(self._group)
        self._origin = self._device.mark()
        with (
            hooks.hook(self._schedule, hooks.HookOrder.RECORD, self._around),
            self._allocated.within_step() if self._allocated else nullcontext(),
            replaced(self._filler, budgets={}) if self._filler else nullcontext(),
        ):
            yield
        self._end = self._device.mark()

    def _around(self, kind: str, stage: int, microbatch: int, compute: Callable[[], Any]) -> Any:
        op = Op(stage, OpKind(kind), microbatch)
        start = self._device.mark()
        # The very first microbatch allocates `.grad`.
        is_late = microbatch >= min(1, pipelining.num_microbatches(self._schedule) - 1)
        is_watched = self._allocated and is_late and self._watched.setdefault((stage, op.kind), op) == op
        with (
            self._allocated.within_op(op) if self._allocated and is_watched else nullcontext(),
            self._follow_waits() as waits,
        ):
            result = compute()
        self._waits[op] += waits
        # The loss is a second F of the last stage.
        first, _ = self._marks.get(op, (start, None))
        # The last stage's output, which may be all logits, is not sent.
        if op.kind is OpKind.F and op.stage != self._last_stage:
            tensors = [each for each in autograd.tree_leaves(result) if isinstance(each, Tensor)]
            num_bytes = sum(each.numel() * each.element_size() for each in tensors)
            self._message_bytes = max(self._message_bytes, num_bytes)
        self._marks[op] = first, self._device.mark()
        return result

    def record(self) -> StepRecord:
        seconds = partial(seconds_between, self._origin)
        end = seconds(self._end)
        spans = tuple(Span(op, seconds(start), seconds(end)) for op, (start, end) in self._marks.items())
        found = self._allocated.found if self._allocated else {}
        kept = {op: each.kept for op, each in found.items() if op.kind in (OpKind.F, OpKind.I)}
        most = {op: each.most for op, each in found.items()}
        waits = {op: sum(starmap(seconds_between, each)) for op, each in self._waits.items()}
        is_typical = self._own is None or self._own.sizes.last_is_typical
        return StepRecord(self._name, end, spans, kept, most, self._message_bytes, waits, is_typical)


class Bytes(NamedTuple):
    """Bytes that code has allocated and not freed."""

    kept: int = 0
    """Bytes at its end; negative if it freed more."""
    most: int = 0

    def then(self, more: Bytes) -> Bytes:
        return Bytes(self.kept + more.kept, max(self.most, self.kept + more.most))


class MemoryCounter:
    """Counts the bytes of ops in one step, used `within_step` and there `within_op`."""

    def __init__(self, device: torch.device) -> None:
        self._meter = on_meta.StorageMeter() if device.type == "cpu" else None
        self._device = self._meter or find_device(device)
        self.found: dict[Op, Bytes] = {}

    def within_step(self) -> AbstractContextManager[object]:
        return self._meter or nullcontext()

    @contextmanager
    def within_op(self, op: Op) -> Iterator[None]:
        """An op can have several pieces, because the loss is part of the last stage's F."""
        self._device.reset_peak()
        before, _ = self._device.count_bytes()
        yield
        kept, most = self._device.count_bytes()
        self.found[op] = self.found.get(op, Bytes()).then(Bytes(kept - before, most - before))
