"""Schedules of zbpipe in the Megatron backend of AMD's Primus, which runs tables of computations and messages.

Primus keeps its runner and its split of the weight gradient. Written for commit fd1eeab. Imports no torch, and Primus
only in `plug_in`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from zbpipe.costs.file import load_costs
from zbpipe.costs.job import JobCosts, MemoryLimit, MemoryLimitLike
from zbpipe.costs.model import SENDS, CostModel, Receives, Transport
from zbpipe.costs.transformer import Checkpointing, usual_costs
from zbpipe.schedule.ir import OpKind, Placement, Schedule
from zbpipe.schedule.registry import Algorithm, resolve
from zbpipe.simulator.actions import COMPUTE, Action, Rows, other_end
from zbpipe.simulator.passes import add_messages, place_receives
from zbpipe.simulator.simulation import simulate
from zbpipe.simulator.validation import require_valid

NAME = "zbpipe"
"""Value of Primus' field `pp_algorithm` for zbpipe."""
_SCHEDULER = "primus.core.pipeline_parallel.scheduler"
_LAUNCHER = "primus.backends.megatron.core.pipeline_parallel.primuspipe.pipeline_launcher"
_NAMES = {"I": "B", "B": "BW", "SEND_F": "SF", "SEND_B": "SB", "RECV_F": "RF", "RECV_B": "RB"}
"""Primus' names of actions that differ from torch's."""
_START = (
    ((True, True), (False, True), (True, False), (False, False)),
    ((False, True), (True, True), (False, False), (True, False)),
)
"""Order of messages that even and odd ranks start together: whether it is a send, and to a higher rank."""
_SENT_AS = {"F": "SEND_F", "I": "SEND_B", "B": "SEND_B"}


@dataclass(frozen=True)
class Choice:
    """The schedule that an experiment asks for.

    >>> print(Choice.of("ZBH1").table(ranks=2, stages_per_rank=1, microbatches=1)[1][0])
    1RECV_F0
    """

    algorithm: Algorithm
    memory_limit: MemoryLimit | None
    costs: JobCosts | None
    """Costs of the stages. None: typical ones."""
    checkpointing: Checkpointing
    blocking: bool
    """Whether a rank waits for each message that it starts (Primus' `communication_method: batch_p2p`)."""

    @classmethod
    def of(
        cls,
        schedule: str,
        memory_limit: MemoryLimitLike | None = None,
        costs_file: str | None = None,
        checkpointing: str = "none",
        *,
        blocking: bool = False,
    ) -> Choice:
        """Raises ValueError for an unknown schedule, an unreadable file, or a limit that the schedule ignores."""
        algorithm = resolve(schedule)
        if algorithm.name == "Auto":
            raise ValueError("zbpipe_schedule: Auto measures on torch's executor, which Primus does not have: take ZB")
        if memory_limit is not None:
            algorithm.require_limits("zbpipe_memory_limit")
        costs = None if costs_file is None else load_costs(costs_file)
        return cls(algorithm, MemoryLimit.parse(memory_limit), costs, Checkpointing.parse(checkpointing), blocking)

    def place(self, ranks: int, stages_per_rank: int) -> Placement:
        """Raises ValueError for stages or a placement that the schedule or Primus does not support."""
        name, own, takes_any = self.algorithm.name, self.algorithm.stages_per_rank, self.algorithm.any_stages_per_rank
        if stages_per_rank != own and not takes_any:
            raise ValueError(
                f"{name} runs {own} stage(s) per rank, but the experiment has {stages_per_rank}: set"
                f" num_virtual_stages_per_pipeline_rank: {own if own > 1 else 'null'}"
            )
        placement = self.algorithm.place(ranks, stages_per_rank if takes_any else None)
        if primus_name(placement) is None:
            raise ValueError(
                f"{name} has its stages on the ranks {list(placement.rank_of)}, but Primus places them in a loop, or"
                " two per rank in a V: set num_virtual_stages_per_pipeline_rank: 2, or take ZBLoop"
            )
        return placement

    def make(self, ranks: int, stages_per_rank: int, microbatches: int) -> tuple[Schedule, CostModel]:
        """The schedule of this size, and its costs. Raises ValueError if there is none."""
        placement = self.place(ranks, stages_per_rank)
        costs = self.costs.on(placement) if self.costs else usual_costs(placement, self.checkpointing)
        how: dict[str, Any] = {"costs": costs, "memory_limit": self.memory_limit, "transport": Transport.ONE_QUEUE}
        schedule = self.algorithm.make_on(placement, microbatches, **how)
        assert schedule is not None, "the placement is one of the schedule"
        if schedule.has_copies:
            raise ValueError(
                f"{schedule.name} copies to the host, which zbpipe does not do in Primus: plan without offload"
            )
        require_valid(schedule)
        for stage, rank in enumerate(placement.rank_of):  # Megatron's stages read their batches in sequence
            ran = [op.microbatch for op in schedule.ops[rank] if op.stage == stage and op.kind is OpKind.F]
            if ran != sorted(ran):
                raise ValueError(f"stage {stage} of {schedule.name} takes microbatches in the order {ran}: plan again")
        return schedule, costs

    def table(self, ranks: int, stages_per_rank: int, microbatches: int) -> Rows:
        """Computations and messages of each rank, in an order without deadlocks. Results for another stage on the same
        rank have a send and a receive, too, one after the other."""
        schedule, costs = self.make(ranks, stages_per_rank, microbatches)
        receives = Receives.NEAREST if self.blocking else Receives.TIMED
        rows = place_receives(add_messages(schedule), receives, simulate(schedule, costs))
        rank_of = schedule.placement.rank_of

        def with_own(row: tuple[Action, ...]) -> Iterator[Action]:
            for action in row:
                yield action
                if action.kind in _SENT_AS:
                    send = action._replace(kind=_SENT_AS[action.kind])
                    other = other_end(send)
                    if other.stage in range(len(rank_of)) and rank_of[other.stage] == rank_of[send.stage]:
                        yield from (send, other)

        return tuple(tuple(with_own(row)) for row in rows)


def primus_name(placement: Placement) -> str | None:
    """Primus' own schedule with I and W and this placement. For other numbers of stages, see `plug_in`."""
    ranks, stages = placement.num_ranks, len(placement.stages_on(0))
    if placement == Placement.loop(ranks, stages):
        return "zero-bubble"
    return "zbv-formatted" if stages == 2 and placement == Placement.v(ranks, 2) else None


def plug_in(params: Any) -> None:
    """Let Primus run zbpipe's schedule, if `params` of its experiment ask for it.

    Call it on every rank after Primus has built its arguments, before it builds the model. It replaces Primus' own
    schedule with the same placement, and names that one, so that Primus cuts the model for it and splits backwards.

    Raises:
        ValueError: the settings cannot run.
    """
    if getattr(params, "pp_algorithm", None) != NAME:
        return
    if not getattr(params, "patch_primus_pipeline", False):
        raise ValueError(f"pp_algorithm: {NAME} is for Primus' own pipeline: set patch_primus_pipeline: true")
    for field in ("offload", "overlap_moe_expert_parallel_comm"):
        if getattr(params, field, False):
            raise ValueError(f"{field}: true is not for zbpipe's schedules: set it to false")
    choice = Choice.of(
        getattr(params, "zbpipe_schedule", None) or "ZB",
        getattr(params, "zbpipe_memory_limit", None),
        getattr(params, "zbpipe_costs_file", None),
        getattr(params, "recompute_granularity", None) or "none",
        blocking=getattr(params, "communication_method", None) == "batch_p2p",
    )
    ranks, stages_per_rank = params.pipeline_model_parallel_size, count_stages(params)
    placement = choice.place(ranks, stages_per_rank)
    if microbatches := count_microbatches(params):
        choice.make(ranks, stages_per_rank, microbatches)
    params.pp_algorithm = primus_name(placement)
    import_module(f"{_SCHEDULER}.schedule_table_factory").pp_algorithm_map[params.pp_algorithm] = class_of(choice)
    if params.pp_algorithm == "zero-bubble" and stages_per_rank > 1:
        _allow_any_stages(import_module(_LAUNCHER))


def _allow_any_stages(module: Any) -> None:
    """Primus' launcher asserts one stage per rank for "zero-bubble"."""
    launcher = module.PrimusPipelineParallelLauncher
    original = launcher.__init__

    def init(self: Any) -> None:
        args = module.get_args()
        args.pp_algorithm, name = "1f1b-interleaved", args.pp_algorithm
        try:
            original(self)
        finally:
            args.pp_algorithm = name
        self.pp_algorithm = name

    launcher.__init__ = init


def count_stages(params: Any) -> int:
    """Stages per rank, in any of Megatron's three ways."""
    ranks = params.pipeline_model_parallel_size
    if layout := getattr(params, "pipeline_model_parallel_layout", None):
        while isinstance(layout, str) and "*" in layout:  # such as Et*3|(tt|)*6L
            layout = re.sub(r"(?:\(([^()*]*)\)|(\w))\*(\d+)", lambda each: (each[1] or each[2]) * int(each[3]), layout)
        return int((layout.count("|") + 1 if isinstance(layout, str) else len(layout)) // ranks)
    if layers := getattr(params, "num_layers_per_virtual_pipeline_stage", None):
        return int(params.num_layers // ranks // layers)
    return int(getattr(params, "num_virtual_stages_per_pipeline_rank", None) or 1)


def count_microbatches(params: Any) -> int | None:
    """Microbatches per step. None if their number changes or is not known yet."""
    batch = getattr(params, "global_batch_size", None)
    if not batch or getattr(params, "rampup_batch_size", None):
        return None
    gpus = int(os.environ.get("WORLD_SIZE", "1"))
    for degree in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
        gpus //= getattr(params, degree, None) or 1
    return int(batch) // (int(params.micro_batch_size) * max(gpus, 1))


def class_of(choice: Choice) -> type:
    base = import_module(f"{_SCHEDULER}.algorithms.base")

    class ZbpipeSchedule(base.PipelineScheduleAlgo):  # type: ignore[misc, name-defined]
        def __init__(self, pp_size: int, vpp_size: int, micro_batches: int, **_: Any) -> None:
            super().__init__(pp_size, vpp_size, micro_batches)
            self.placement = choice.place(pp_size, vpp_size)

        def first_pp_stage_rank(self) -> int:
            return self.placement.rank_of[0]

        def last_pp_stage_rank(self) -> int:
            return self.placement.rank_of[-1]

        def direction_map(self, rank: int, chunk: int, func_type: Any) -> dict[str, Any]:
            """Rank and chunk before and after this one: forward for F, otherwise backward."""
            stage = self.placement.stages_on(rank)[chunk]
            step, letter = (1, "F") if func_type.name == "F" else (-1, "B")
            (before, from_chunk), (after, to_chunk) = self._locate(stage - step), self._locate(stage + step)
            return {
                "prev": (before, type(func_type)[f"R{letter}"]),
                "next": (after, type(func_type)[f"S{letter}"]),
                "recv_from_chunk": from_chunk,
                "send_to_chunk": to_chunk,
            }

        def _locate(self, stage: int) -> tuple[int | None, int | None]:
            if stage not in range(self.placement.num_stages):
                return None, None
            rank = self.placement.rank_of[stage]
            return rank, self.placement.stages_on(rank).index(stage)

        def generate_schedule_table(self) -> list[list[Any]]:
            rows = choice.table(self.pp_size, self.vpp_size, self.micro_batches)
            return [list(self._nodes(rank, row)) for rank, row in enumerate(rows)]

        def _nodes(self, rank: int, row: tuple[Action, ...]) -> Iterator[Any]:
            step, last = 0, -1
            for stage, kind, microbatch in row:
                name, chunk = base.FuncType[_NAMES.get(kind, kind)], self._locate(stage)[1]
                if kind in COMPUTE:
                    yield base.SchedulerNode(name, microbatch, chunk)
                    continue
                other, its_chunk = self._locate(other_end(Action(stage, kind, microbatch)).stage)
                sends = kind in SENDS
                args: dict[str, Any] = {
                    "from_pp_rank": rank if sends else other,
                    "to_pp_rank": other if sends else rank,
                    "send_to_chunk" if sends else "recv_from_chunk": its_chunk,
                }
                if not choice.blocking:
                    # Neighbours of one time step start together, in Primus' order. So a step ends where ours differs.
                    order = (
                        last
                        if other == rank
                        else _START[rank % 2].index((sends, args["from_pp_rank"] < args["to_pp_rank"]))
                    )
                    step, last = step + (order < last), order
                    args["time_step"] = step
                yield base.SchedulerNode(name, microbatch, chunk, args)

    return ZbpipeSchedule
