"""Detection of permanent changes of a job's step times. All ranks react in the same step.

Each step costs two clock readings. The first rank alone decides, because a slow rank or link delays the steps of all
ranks. It announces a step in the job's key-value store. The others check the store in some steps, whose numbers all
ranks know. The announced step is at least two steps ahead, and no rank can begin it before the first rank has begun the
step before it. So either all ranks find the announcement, or none does.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from math import ceil
from typing import Any
from weakref import ref

import torch.distributed as dist

from zbpipe.costs.drift import Drift, DriftDetector
from zbpipe.runtime._torch import pipelining
from zbpipe.runtime.measure.recording import Wanted, Watcher
from zbpipe.runtime.ranks.agreement import make_key
from zbpipe.runtime.schedules import RegisteredSchedule

_LOOKS_EVERY = 0.2
"""Seconds between checks. One check of the store takes about 0.1 ms."""


class DriftWatcher(Watcher):
    """Calls `found` on all ranks before the same step, when step times have changed permanently.

    It refers to no schedule, and detaches after that call. Steps of an unusual size do not count. `seconds` of a step
    is the same number on all ranks of `group`.
    """

    def __init__(
        self,
        schedule: RegisteredSchedule,
        group: dist.ProcessGroup | None,
        seconds: float,
        found: Callable[[Any, Drift], None],
    ) -> None:
        self._schedule = ref(schedule)
        self._found = found
        self._key = make_key("drift", dist.get_process_group_ranks(group or dist.group.WORLD))
        self._detector = DriftDetector() if dist.get_rank(group) == 0 else None
        self._every = max(1, ceil(_LOOKS_EVERY / seconds))
        self._step = 0
        self._began: float | None = None

    def before(self) -> Wanted | None:
        schedule = self._schedule()
        if schedule is None:
            return None
        self._step += 1
        if self._detector is not None:
            self._look_at_last_step(schedule, time.perf_counter())
        if self._step % self._every:
            return Wanted.NOTHING
        drift = self._read_drift()
        if drift is None:
            return Wanted.NOTHING
        self._found(schedule, drift)
        return None

    def missed(self) -> None:
        self._began = None

    def _look_at_last_step(self, schedule: RegisteredSchedule, now: float) -> None:
        """Time the last step from begin to begin: a GPU's host finishes a step long before the GPU."""
        assert self._detector is not None
        began, self._began = self._began, now
        if began is None or not schedule.sizes.last_was_usual:
            return
        drift = self._detector.observe(now - began)
        if drift is not None:
            step = ceil((self._step + 2) / self._every) * self._every
            pipelining.default_store().set(self._key, json.dumps([step, drift.ratio, drift.steps]))
            self._detector = None

    def _read_drift(self) -> Drift | None:
        """The first rank's announcement for this step."""
        store = pipelining.default_store()
        if not store.check([self._key]):
            return None
        step, ratio, steps = json.loads(store.get(self._key))
        return Drift(ratio, steps) if step == self._step else None
