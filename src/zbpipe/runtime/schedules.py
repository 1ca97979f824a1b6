"""zbpipe's schedules as classes on torch's executor."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, replace
from functools import partial
from typing import Any, ClassVar, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from zbpipe.costs.job import MemoryLimit, MemoryLimitLike, as_cost_model
from zbpipe.costs.model import CostModel, FillWaits, Receives, Transport
from zbpipe.planner.result import Plan
from zbpipe.runtime import checks
from zbpipe.runtime._torch import fsdp2, hooks, pipelining
from zbpipe.runtime._torch.fsdp2 import FsdpMode
from zbpipe.runtime._torch.shapes import cut_batch
from zbpipe.runtime.device import RandomState, find_device
from zbpipe.runtime.lists import Lists
from zbpipe.runtime.measure.transport import Probe, find_known_of
from zbpipe.runtime.module_state import Buffers
from zbpipe.runtime.offload import Copies, make_copier
from zbpipe.runtime.ranks import agreement, tied_weights
from zbpipe.runtime.ranks.progress import StepFailures
from zbpipe.runtime.ranks.step_board import StepBoard, StepSizes
from zbpipe.runtime.ranks.warm_up import warm_up
from zbpipe.runtime.split import stage as split
from zbpipe.runtime.split.stage import SplitBackward
from zbpipe.runtime.split.waits import WaitFiller
from zbpipe.runtime.split.weight_gradients import WeightGradients, defer_in_loss
from zbpipe.schedule.ir import OpKind, Schedule
from zbpipe.schedule.registry import Algorithm
from zbpipe.schedule.user_code import read_text
from zbpipe.simulator.offloading import Offload
from zbpipe.simulator.simulation import simulate

PLAIN = (
    "without events after computations, fused W, W of compiled regions, FSDP during computations, offload, a probe,"
    " filled waits"
)
"""What `plain` turns off."""

logger = logging.getLogger(__name__)


class RegisteredSchedule(pipelining.OwnRuntime):
    """A schedule from zbpipe's registry on torch's schedule runtime. Each subclass is one schedule.

    torch lowers the list of computations to sends and receives, and executes it.

        schedule = zbpipe.ScheduleZBV(stages, n_microbatches=8, loss_fn=loss_fn)
        schedule.step(batch, target=target)

    `zbpipe.build_pipeline_schedule` takes the schedule's name instead.

    Args:
        stages: all stages of this rank, which `zbpipe.stage_indices` names.
        n_microbatches: the number of microbatches, at least 1.
        loss_fn: `(output, target) -> loss`. Without it only `eval` runs.
        split_backward: with "deferred", I is one ordinary backward and W computes the weight gradients (see
            `zbpipe.runtime.split.deferring_layers`). For a stage without a layer that can defer, "deferred" logs a
            warning, and "strict" raises an error. "autograd" is torch's own split, for comparison.
        defer_loss: whether to defer to W also the weight gradients of backwards that the loss runs during F, such as
            the LM head's in TorchTitan's chunked loss. The gradients of all logits of a microbatch then stay in memory
            until W.
        fsdp_mode: with "overlap", FSDP2 gathers the stage's later modules (with `fully_shard` or `replicate`) during
            the stage's first F, and reduces each module in its last W or B, as soon as the module's gradients are
            complete. With "reshard", each module also gathers its parameters for each F and backward, and then frees
            them (ZeRO-3 in the pipeline). With "torch", F waits for all modules, and reductions follow the last W or
            B. Reductions with a framework's own backward do this in all modes, as does everything with a torch whose
            FSDP2 zbpipe does not know (`zbpipe.runtime._torch.fsdp2`).
        costs: costs for schedules that adapt to measured times (ZB1P, ZB2P), to place receives, and for `offload`.
        memory_limit: limit for schedules that adapt to one (ZB, ZBLoop, Auto), see `zbpipe.costs.MemoryLimit`.
        offload: tensors to offload to host memory, as much as fits without slowing the step: "pairs" (deferred
            gradients), "activations" or "all" (also True). Needs costs with `host`. A schedule with its own copies,
            such as a plan, runs them without this option.
        receives: when ranks post their receives: "early", "late", "timed", "nearest" or "rendezvous" (see
            `zbpipe.costs.model.Receives`). Default: the choice with the shortest step, simulated with the transport
            and with `costs`, or equal times of F, I and W.
        transport: transport of messages: "ideal", "one queue", "queue per peer" or "shared with compute" (see
            `zbpipe.costs.model.Transport`). Default on the CPU: "ideal". On GPUs, torch's version and variables
            determine which messages wait for each other. After the first step all ranks measure, once, whether
            computations wait for messages, too. If so, the schedule is remade (see `zbpipe.runtime.measure.transport`).
        fill_waits: whether W's products run while F, I and B wait for collectives (of tensor, expert or context
            parallelism): "own" fills the waits of I and B with products of their stage, "all" also those of F, with
            products of all the rank's stages. One early step measures the waits. Gradients are bit-identical. No GPU
            has run it yet; compiled stages and schedules with copies to the host train as without it.
        plain: whether to turn off what GPUs run differently from CPUs, to find a fault: events after computations, one
            kernel for product and addition in W, W of compiled regions, FSDP during computations, copies to the host,
            and the probe of the transport. Gradients are the same.
        options: further arguments of torch's multi-stage schedules, if the installed torch has them: `scale_grads`,
            `args_chunk_spec`, `kwargs_chunk_spec`, `output_merge_spec`, `max_active_stages`, `unshard_lookahead`,
            `defer_reduce_grad_wait`, `max_outstanding_sends` and others. Without the last one, zbpipe frees a sent
            tensor as soon as its receipt is certain.

    Raises:
        ValueError: the stages do not fit the schedule, the installed torch lacks an option, or a stage's backward
            cannot be split.
    """

    algorithm: ClassVar[Algorithm]
    changes_by_itself: ClassVar[bool] = False
    """Whether the schedule may switch to other lists later."""
    tied_copies: Sequence[Tensor] = ()
    """This rank's copies of tied weights: the norm of all gradients counts only the other copy."""
    refuses_capture: bool = False
    """Whether a step in a CUDA graph is refused: frameworks capture it by default."""
    run_checked: Callable[..., None] | None = None
    """Runs the microbatches of a checked step, by a function that it gets with that function's arguments."""
    _size: int | tuple[int, ...] | None = None
    """The running step's number of microbatches, or the number of tokens of each; None for the usual size."""
    _cut: tuple[Any, Any, Any] | None = None
    """The running step's batch, cut by numbers of tokens: inputs, keyword inputs and targets."""
    _copies: Copies | None = None
    _probe: Probe | None = None
    """Measures the transport after the first step; None afterwards, or with a known transport."""
    _models_are_checked = False
    _is_warm = False
    """Whether the compiler has seen the stages."""
    _replays: Tensor | None = None
    """A counter on the device, which captured steps increment; None before the first step."""

    # More than seven parameters: users write them as keywords, as with torch's own schedules.
    def __init__(
        self,
        stages: PipelineStage | Sequence[PipelineStage],
        n_microbatches: int,
        loss_fn: Callable[..., Tensor] | None = None,
        *args: Any,
        split_backward: SplitBackward = "deferred",
        defer_loss: bool = False,
        fsdp_mode: FsdpMode = "overlap",
        costs: CostModel | None = None,
        memory_limit: MemoryLimitLike | None = None,
        offload: Offload | str | bool | None = None,
        receives: Receives | str | None = None,
        transport: Transport | str | None = None,
        fill_waits: FillWaits = "off",
        plain: bool = False,
        **options: Any,
    ) -> None:
        algorithm = self.algorithm
        checks.require_yes_or_no("defer_loss", defer_loss)
        checks.require_yes_or_no("plain", plain)
        checks.require_options(algorithm.name, options, RegisteredSchedule.__init__, pipelining.SCHEDULE_OPTIONS)
        checks.require_one_of("fsdp_mode", fsdp_mode, get_args(FsdpMode))
        checks.require_one_of("fill_waits", fill_waits, get_args(FillWaits))
        if plain:
            logger.warning("plain: %s", PLAIN)
            fsdp_mode, fill_waits = "torch", "off"
        n_microbatches = checks.require_microbatches(algorithm.name, n_microbatches, loss_fn)
        limit = MemoryLimit.parse(memory_limit, costs_are_known=costs is not None)
        stages, self.placement = checks.place_stages(stages, algorithm)
        known = find_known_of(stages[0])
        self.lists = Lists(
            algorithm,
            self.placement,
            None if costs is None else replace(as_cost_model(costs, self.placement), fill_waits=fill_waits),
            limit,
            Offload.read(offload),
            known.transport if transport is None else Transport.parse(transport),
            checks.read_receives(receives, options),
            frees_sends_early=options.get("max_outstanding_sends") is None,
        )
        schedule = self.lists.of(n_microbatches)
        self._is_plain = plain
        gradients = WeightGradients(may_fuse=not plain)
        question = agreement.make_key("waits", [stage.stage_index for stage in stages])
        self.waits = WaitFiller(fill_waits, partial(agreement.find_once, question))
        if not self.waits.is_decided:
            gradients.has_collectives = set()
        self._split: Callable[[], object] | None = partial(
            split.split_backward, stages, split_backward, gradients, in_compiled_regions=not plain, waits=self.waits
        )
        """Splits the backward into I and W; None afterwards."""
        self.defers_loss = defer_loss and split_backward != "autograd"
        """Whether backwards in the loss defer their weight gradients to W."""
        if self.defers_loss and loss_fn is not None:
            loss_fn = defer_in_loss(loss_fn, gradients)
        super().__init__(stages, n_microbatches, loss_fn, *args, **options)
        for work in self.works:
            work.fsdp_mode = fsdp_mode
        if dist.get_rank() == 0 and any(fsdp2.is_shared(stage.submod) for stage in stages):
            logger.info("%s", fsdp2.describe(fsdp_mode, (stage.submod for stage in stages)))
        board = StepBoard(stages[0])
        self._failures = StepFailures(board, has_events=not plain)
        self.sizes = StepSizes(board, n_microbatches)
        self._use(schedule)
        is_unsure = transport is None and known.transport.has_queues and not known.is_measured and not plain
        if is_unsure and not board.is_alone and (self.lists.receives is None or "transport" in algorithm.keywords):
            self._probe = Probe(stages[0], [work.messages for work in self.works], board, known.queues)
        checks.require_scaled_once(self, algorithm.name)

    @property
    def transport(self) -> Transport:
        return self.lists.transport

    @property
    def schedule(self) -> Schedule:
        return self.lists.running.schedule

    @property
    def receives(self) -> Receives:
        """When ranks post their receives in the running schedule."""
        return self.lists.running.receives

    @property
    def is_steady(self) -> bool:
        """Whether a CUDA graph can capture the next step of the usual size: the host does not wait in that step.

        True after two steps, unless a layer first runs in the second; with Auto, a step after it has measured.
        """
        is_ready = pipelining.is_set_up(self) and self.lists.running.is_agreed and self.waits.is_decided
        splits = filter(None, map(split.find_split, pipelining.stages_of(self)))
        return is_ready and (not pipelining.trains(self) or all(each.is_steady for each in splits))

    @property
    def replays(self) -> int:
        """Number of replays of training steps that CUDA graphs have captured. Waits for the device."""
        return 0 if self._replays is None else int(self._replays)

    def adopt(self, schedule: Schedule | Plan, costs: CostModel | None = None) -> None:
        """Run `schedule` from the next step on, on the same stages. All ranks have to call this between two steps.

            schedule.adopt(zbpipe.plan(4, 8, costs))

        The next step begins with a check that all ranks have the same schedule.

        Args:
            schedule: a schedule or a plan with the placement of the running one. Steps with its number of microbatches
                run it. Other steps keep their schedules.
            costs: costs that place receives from now on, the same on all ranks. Default: the plan's, or the known ones.

        Raises:
            ValueError: the schedule has another placement, or cannot run.
        """
        if isinstance(schedule, Plan):
            costs = costs or schedule.timeline.costs
            schedule = schedule.schedule
        if not isinstance(schedule, Schedule):
            raise ValueError(f"adopt takes a zbpipe.Schedule, for example of zbpipe.generate, got {schedule!r}")
        checks.require_same_placement(schedule, self.placement)
        checks.require_pairs(schedule, pipelining.stages_of(self))
        if costs is not None:
            self.lists.use_costs(as_cost_model(costs, self.placement))
        if schedule.num_microbatches == pipelining.num_microbatches(self):
            self._use(schedule)
        else:
            checks.require_runnable(schedule)
        self.lists.adopt(schedule)

    def load_table(self, file: str) -> None:
        self.adopt(Schedule.from_csv(read_text(file), name=str(file)))

    def remake(self, costs: CostModel | None, transport: Transport | None = None) -> None:
        """Remake all schedules that were not adopted, for these costs. All ranks have to call this."""
        self.lists.use_costs(costs, transport)
        self._use(self.lists.of(pipelining.num_microbatches(self)))

    def _take_microbatches(self, number: int) -> None:
        if number != pipelining.num_microbatches(self):
            schedule = self.lists.of(number)
            pipelining.use_microbatches(self, number)
            self._use(schedule)

    def _use(self, schedule: Schedule) -> None:
        """Run a schedule, with the next step's number of microbatches, from that step on."""
        schedule = schedule.computations if self._is_plain else schedule
        stages = pipelining.stages_of(self)
        lowered = self.lists.lower(self, schedule)
        if self._split and OpKind.I in schedule.kinds:
            self._split()
            self._split = None
        checks.require_pairs(schedule, stages)
        if schedule.has_copies:
            self._copies = self._copies or Copies(stages, make_copier(pipelining.device_of(stages[0])))
            self._copies.follow(simulate(schedule, self.lists.simulated_costs))
        self.lists.use(self, lowered)

    def settle(self) -> None:
        """Before the first step, adopt another schedule if the ranks together know better costs. All ranks call it."""

    def initialize_stages(self, *args: Any, **kwargs: Any) -> None:
        """Before a step's messages, give them its shapes. Infer these and compile before the first step, on all ranks
        at once."""
        if not pipelining.is_set_up(self):
            self._set_up(*args, **kwargs)
        self.sizes.give_to_messages(self)

    def _set_up(self, *args: Any, **kwargs: Any) -> None:
        with ExitStack() as kept:
            # A loss or layer that calls `backward` itself leaves gradients of zeros.
            for stage in pipelining.stages_of(self):
                kept.callback(Buffers([stage.submod]).restore)  # torch restores only those that no forward replaces
                kept.enter_context(fsdp2.without_gradients(stage.submod))
                kept.enter_context(split.infer_without_compiler(stage))
            super().initialize_stages(*args, **kwargs)
        self.sizes.follow_setup(self, *args[:2])
        if pipelining.trains(self) and not self._is_warm:
            self._is_warm = True
            first = split.find_split(pipelining.stages_of(self)[0])
            # Compiled blocks have a backward for B, and another one for I.
            with first.gradients.record() if first and OpKind.B not in self.schedule.kinds else nullcontext():
                warm_up(self, *args, **kwargs)

    def step(
        self, *args: Any, target: Any = None, microbatches: int | Sequence[int] | None = None, **kwargs: Any
    ) -> Any:
        """One training step, with torch's arguments. The batch is split into equal microbatches.

        Args:
            args: torch's arguments, like `kwargs`. `arg_mbs`, `kwarg_mbs` and `target_mbs` are lists with a value for
                each microbatch.
            target: target of the batch, on the rank with the last stage.
            microbatches: number of microbatches of this step, if not `n_microbatches`, or the number of tokens of each,
                by which the batch is cut; on all ranks. The shapes of microbatches may then differ from each other and
                from the first step's. The ranks compare this before the step. Already split microbatches (torch's
                `kwarg_mbs`) determine the number themselves.

        Returns:
            The output, on the rank with the last stage; a list of the microbatches' outputs if their shapes differ.

        Raises:
            ValueError: before anything is sent, for a batch not divisible by the number of microbatches, new shapes
            without `microbatches=`, different shapes with scale_grads, an empty microbatch, no input for stage 0, no
            target for the last stage, no loss_fn, a `microbatches` that differs between ranks, or a step that a CUDA
            graph captures and cannot replay. The next step can follow if all ranks refuse this one. PipelineError: this
            step, or an earlier one, failed on any rank, or only another rank refuses this step.
        """
        size = self.sizes.find_number(microbatches, kwargs.get("kwarg_mbs"))
        with self._failures.begin_step(self, self.schedule.name, is_compared=size is not None):
            try:
                if find_device(pipelining.device_of_rank(self)).is_capturing():
                    self._begin_capture(size)
                self._size = size = checks.read_size(size)
                self._cut = None
                if isinstance(size, tuple) and all(kwargs.get(name) is None for name in checks.LISTS):
                    self._cut, kwargs = cut_batch(args, target, kwargs, size, pipelining.STEP_OPTIONS)
                    args, target = (), None
                self._take_microbatches(
                    self.sizes.usual if size is None else len(size) if isinstance(size, tuple) else size
                )
                checks.require_step(self, args, kwargs, target, is_first=not self._models_are_checked)
                if self.optimizer_step is not None:
                    self.optimizer_step.require_unchanged()
                return super().step(*args, target=target, **kwargs)
            finally:
                self._take_microbatches(self.sizes.usual)

    def merge_outputs(self, outputs: list[Any]) -> Any:
        return [*outputs] if len({*(self.sizes.inputs or ())}) > 1 else super().merge_outputs(outputs)

    def _begin_capture(self, microbatches: Any) -> None:
        """Refuse a step that a CUDA graph cannot replay. Otherwise have the graph count its replays."""
        trains = pipelining.trains(self)
        kept = fsdp2.find_kept_gradients(stage.submod for stage in pipelining.stages_of(self)) if trains else []
        refusals = {
            "only your own loops can, and no GPU has run it yet: turn it off, in TorchTitan by"
            " --training.disable_cuda_graphs": self.refuses_capture,
            "all replays have one size: omit microbatches=, or give the usual number of them": microbatches is not None,
            "it copies to the host: omit offload, or adopt a schedule without copies": self.schedule.has_copies,
            "zbpipe.OptimizerStep decides in every step what runs: use the optimizer's own step": self.optimizer_step,
            "scale_grads would multiply the kept gradients by the number of microbatches in each replay: set them to"
            " None before the capture, or build with scale_grads=False and divide the loss": self.scale_grads and kept,
            "the first steps, and Auto's while it measures, compare lists and contents: first run the same number of"
            " steps on all ranks, at least two, until schedule.is_steady": not self.is_steady,
        }
        if found := next((reason for reason, applies in refusals.items() if applies), None):
            raise ValueError(f"a CUDA graph cannot capture this step of {self.schedule.name}: {found}")
        if trains and self._replays is not None:
            self._replays += 1
            logger.info(
                "A CUDA graph captures a step of %s. Its replays are not measured: the log has no bubble and no trace"
                " of them, and schedule.replays counts them",
                self.schedule.name,
            )

    def run_microbatches(self, args: Any, kwargs: Any, targets: Any, *more: Any, **more_by_name: Any) -> None:
        """Run one step on already split microbatches. Invalid steps are refused, failures are explained."""
        stages, running = pipelining.stages_of(self), self.lists.running
        args, kwargs, targets = self._cut or (args, kwargs, targets)
        checks.require_inputs(self, args, kwargs, targets)
        self.sizes.agree(self, self._size, args, kwargs)
        with self._failures.explain_failures(self, self.schedule.name):
            # The ranks compare their lists before they set up messages.
            if not (running.is_agreed and pipelining.is_set_up(self)):
                if not running.is_agreed:
                    self.settle()
                agreement.require_same(self, self.schedule.name, stages[0].group, stages[0].device)
                self.lists.running.is_agreed = True
            if pipelining.trains(self) and not self._models_are_checked:
                if pipelining.has_split_backward(self):
                    split.require_no_early_reduction(stages)
                    split.require_memory_that_lasts(stages)
                tied_weights.warn_if_parted(stages, self.placement)
                self._models_are_checked = True
                self._replays = torch.zeros((), dtype=torch.int64, device=stages[0].device)  # not in a graph's memory
            self.sizes.pass_on_unfreezing(self)
            run = partial(self.run_checked, super().run_microbatches) if self.run_checked else super().run_microbatches
            run = partial(run, args, kwargs, targets, *more, **more_by_name)
            with (
                self._copies.issue_during(self) if self._copies and self.schedule.has_copies else nullcontext(),
                self._follow_waits(),
            ):
                self._run_ahead(run)
            if self._probe is not None and pipelining.trains(self):
                self._use_transport(self._probe.find_transport())
                self._probe = None

    def _follow_waits(self) -> AbstractContextManager[None]:
        stages = pipelining.stages_of(self)
        if self.waits.how == "off" or not pipelining.trains(self):
            return nullcontext()
        copies = "copies to the host take the tensors of W's products away" if self.schedule.has_copies else ""
        if obstacle := copies or split.find_obstacle_to_fills(stages):
            self.waits.turn_off(obstacle)
            return nullcontext()
        splits = list(filter(None, map(split.find_split, stages)))
        return self.waits.follow_step(splits)

    def _use_transport(self, transport: Transport) -> None:
        """Remake all schedules for the measured transport, unless they are made for it."""
        if transport is not self.transport:
            self.remake(self.lists.costs, transport)
        how = "computations wait" if transport is Transport.SHARED else "no computation waits"
        logger.info("Messages: %s receives, for the transport %r: %s for messages", self.receives, str(transport), how)

    def _run_ahead(self, run: Callable[[], None]) -> None:
        """Run a step ahead of a pending validation of the last optimizer step. Repeat it if the step is void."""
        stages, last, trains = pipelining.stages_of(self), self.optimizer_step, pipelining.trains(self)
        kept: list[Tensor] = []
        if self.scale_grads and trains:  # then the end of the step also divides earlier steps' gradients
            kept = fsdp2.find_kept_gradients(stage.submod for stage in stages)
        cut = self.lists.cut(self) if last is not None and last.is_pending and trains else None
        with hooks.saved_from_scaling(self, kept):
            if last is None or cut is None:
                self.finish_optimizer_step()
                run()
                return
            random = RandomState(pipelining.device_of(stages[0]))
            if not pipelining.run_ahead(self, cut, last.verdict, run):
                last.redo()
                random.restore()
                run()

    @property
    def optimizer_steps(self) -> dict[str, int]:
        """Numbers of `zbpipe.OptimizerStep`'s steps of each kind. Empty without it."""
        return {} if self.optimizer_step is None else asdict(self.optimizer_step.counts)
