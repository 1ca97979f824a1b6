"""zbpipe's schedules as classes on torch's executor."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Protocol

from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from zbpipe import passes, registry
from zbpipe.costs import CostModel
from zbpipe.files import read_text
from zbpipe.ir import OpKind, Schedule
from zbpipe.offloading import Offload
from zbpipe.offloading import offload as offloaded
from zbpipe.planner.result import Plan
from zbpipe.running_ahead import RunAhead, ahead_of, gain
from zbpipe.runtime import _torch, agreement, arguments, checks, failures, ties
from zbpipe.runtime.failures import PipelineError, RefusedStepError
from zbpipe.runtime.messages import usual_transport
from zbpipe.runtime.offload.beside import Copies
from zbpipe.runtime.offload.copiers import copier_for
from zbpipe.runtime.optimizer.backup import RandomState
from zbpipe.runtime.split import stage as split
from zbpipe.runtime.split.compiled import forget_eager_calls
from zbpipe.runtime.split.loss import defer_in_loss
from zbpipe.runtime.split.products import WeightGradients
from zbpipe.runtime.split.stage import SplitBackward
from zbpipe.runtime.step_sizes import StepSizes
from zbpipe.runtime.warm_up import warm_up
from zbpipe.simulation import best_receives, simulate
from zbpipe.transport import Receives, Transport
from zbpipe.yardstick import in_unit_of


class Validation(Protocol):
    """Of an optimizer step that was made before all gradients were known."""

    @property
    def is_pending(self) -> bool:
        """Whether there is a step to validate."""

    @property
    def counts(self) -> Any:
        """A dataclass with a number for each kind of step."""

    def verdict(self) -> bool:
        """Wait until it is known whether the step counts."""

    def redo(self) -> None:
        """After a verdict against it: make the step again."""

    def finish(self) -> None:
        """Both, if there is a step to validate."""


@contextmanager
def _without_collections() -> Iterator[None]:
    """Lists are tens of thousands of objects, so making them makes Python look for garbage among all it knows."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass
class _Lowered:
    """A schedule as torch runs it."""

    lists: _torch.Lists
    receives: Receives
    is_agreed: bool = False
    """Whether all ranks have been seen to have the same lists."""
    ahead: RunAhead | None = None
    """The lists cut for the validation of an optimizer step; None until that is needed."""


class RegisteredSchedule(_torch.OwnRuntime):
    """A schedule from zbpipe's registry on torch's schedule runtime. Each subclass is one schedule.

    torch lowers the list of computations to sends and receives, and executes it.

        schedule = zbpipe.ScheduleZBV(stages, n_microbatches=8, loss_fn=loss_fn)
        schedule.step(batch, target=target)

    `zbpipe.build_pipeline_schedule` takes the schedule by its name instead.

    Args:
        stages: all stages of this rank, which `zbpipe.stage_indices` names.
        n_microbatches: any number from 1 on.
        loss_fn: `(output, target) -> loss`; without it there is only `eval`.
        split_backward: with "deferred", I is one ordinary backward and W computes the weight gradients (see
            `zbpipe.runtime.split.layers`); a stage without a layer that can defer is a warning in the log. With
            "strict" it is an error. "autograd" is torch's own split, for comparison.
        defer_loss: whether weight gradients of backwards that the loss runs itself during F, as TorchTitan's chunked
            loss does with the LM head, wait for W, too. The gradients of all logits of a microbatch then stay in memory
            until W.
        costs: for schedules that adapt to measured times (ZB1P, ZB2P), to place receives, and for `offload`.
        memory_limit: for schedules that fit themselves to one (ZBVLean, ZBH1Lean, Auto): what a rank may hold, with
            what ops need while they run. A number of microbatches of an average rank's share, of which 1F1B's first
            rank holds p, or a multiple of what 1F1B's worst rank holds under the same costs, such as "1.2x".
        offload: what goes to the host's memory and comes back in time, as far as that costs no time: "pairs" (what
            waits for W), "activations" (what F leaves) or "all" (also True). It needs costs with `host`. A schedule
            that has copies already, such as a plan's, runs them without this.
        receives: when ranks post their receives: "early", "late", "timed" or "nearest" (see
            `zbpipe.transport.Receives`). By default what gives the shortest step, as simulated with the transport and
            `costs`, or with equal times of F, I and W.
        transport: what messages wait for: "ideal", "one queue", "queue per peer" or "shared with compute" (see
            `zbpipe.transport.Transport`). By default what is usual on the device: "ideal" on the CPU, "shared with
            compute" on AMD's GPUs, "one queue" on others, or "queue per peer" if torch has a group for each edge.
        defer_pp_recv: torch's name for late receives (True) or early ones (False), instead of `receives`.
        options: the other arguments of torch's multi-stage schedules that the installed torch has: `scale_grads`,
            `args_chunk_spec`, `kwargs_chunk_spec`, `output_merge_spec`, `max_active_stages`, `unshard_lookahead`,
            `defer_reduce_grad_wait`, `max_outstanding_sends` and so on. Without the last one, zbpipe frees sent tensors
            as soon as they have surely been received.

    Raises:
        ValueError: stages that do not fit the schedule, an option that the installed torch lacks, or a stage whose
            backward cannot be split.
    """

    schedule_name: ClassVar[str]
    given: ClassVar[Schedule | None] = None
    """What runs, where that is not made from the name."""
    changes_by_itself: ClassVar[bool] = False
    """Whether it may run other lists later than the first ones."""
    receives: Receives
    """When ranks post their receives, in the schedule that runs."""

    def __new__(cls, stages: Any = (), n_microbatches: int = 1, *args: Any, **options: Any) -> Any:
        """Itself; for torch's schedule visualizer, whose stages are mocks, only the list of computations."""
        if _torch.are_mocks(stages):
            return list_for_visualizer(cls.given or cls.schedule_name, stages, n_microbatches)
        return super().__new__(cls)

    # More than seven parameters: these are the keywords that users write, as torch's own schedules have them.
    def __init__(
        self,
        stages: PipelineStage | Sequence[PipelineStage],
        n_microbatches: int,
        loss_fn: Callable[..., Tensor] | None = None,
        *args: Any,
        split_backward: SplitBackward = "deferred",
        defer_loss: bool = False,
        costs: CostModel | None = None,
        memory_limit: float | str | None = None,
        offload: Offload | str | bool | None = None,
        receives: Receives | str | None = None,
        transport: Transport | str | None = None,
        defer_pp_recv: bool | None = None,
        **options: Any,
    ) -> None:
        # `make` must not hold the schedule: in a circle its process group would outlive the job, and peers would wait.
        self._algorithm = algorithm = registry.lookup(self.given or self.schedule_name)
        arguments.require_yes_or_no("defer_loss", defer_loss)
        limit, wanted = arguments.limit(memory_limit), Offload.parse(offload)
        checks.require_options(algorithm.name, options, RegisteredSchedule.__init__, _torch.SCHEDULE_OPTIONS)
        asked_receives = checks.asked_receives(receives, defer_pp_recv, options)
        transport = None if transport is None else Transport.parse(transport)
        n_microbatches = checks.require_microbatches(algorithm.name, n_microbatches, loss_fn)
        stages, placement = checks.placed(stages, algorithm)
        per_rank = len(stages) if algorithm.any_stages_per_rank else None

        def make(costs: CostModel | None, runs_ahead: bool = False, microbatches: int = n_microbatches) -> Schedule:
            size = placement.num_ranks, microbatches
            room = None if limit is None else in_unit_of(costs or CostModel.uniform(placement), limit, *size)
            made = registry.generate(
                algorithm.handle,
                *size,
                stages_per_rank=per_rank,
                costs=costs,
                memory_limit=room,
                runs_ahead=runs_ahead,
            )
            if wanted is None:
                return made
            return offloaded(made, costs or passes.unknown_costs(placement), what=wanted)

        schedule = make(costs)
        gradients = WeightGradients()
        defers_loss = defer_loss and split_backward != "autograd"
        if defers_loss and loss_fn is not None:
            loss_fn = defer_in_loss(loss_fn, gradients)
        super().__init__(stages, n_microbatches, loss_fn, *args, **options)
        self.defers_loss = defers_loss
        """Whether backwards inside of the loss defer their weight gradients to W."""
        self.transport = transport or usual_transport(stages[0])
        """What messages wait for."""
        self._asked_receives = asked_receives
        self._costs = costs
        self._frees_sends_early = options.get("max_outstanding_sends") is None
        self.placement = placement
        """Which rank has which stage."""
        self.sizes = StepSizes(stages[0], n_microbatches)
        """Of the steps: numbers of microbatches, and shapes."""
        self._failures = failures.Steps(self.sizes.comparison)
        self.always_train()
        self._adopted: dict[int, Schedule] = {}
        """By number of microbatches, what such a step was made to run."""
        self._made: dict[int, Schedule] = {n_microbatches: schedule}
        """What other steps run."""
        self._lowered: dict[Schedule, _Lowered] = {}
        self._models_are_checked = False
        self._is_warm = False
        """Whether the compiler has seen the stages."""
        self._copies: Copies | None = None
        """What runs the copies of schedules that have some."""
        self.made_for = make
        """Makes the schedule for other costs, for steps that run ahead, and for other numbers of microbatches."""
        self._split: Callable[[], object] | None = lambda: split.split_backward(
            _torch.stages_of(self), split_backward, gradients
        )
        """None once I and W share the backward."""
        self._validation: Validation | None = None
        self._use(schedule)
        checks.require_scaled_once(self, algorithm.name)

    def adopt(self, schedule: Schedule | Plan, costs: CostModel | None = None) -> None:
        """Run `schedule` from the next step on, on the same stages. All ranks have to call this between two steps.

            schedule.adopt(zbpipe.plan(4, 8, costs))

        The next step begins with a check that all ranks have the same schedule.

        Args:
            schedule: one, or a plan, with the placement of the one that runs. Steps with its number of microbatches
                run it, the others run what they ran before.
            costs: to place receives from now on, the same on all ranks; default: those of the plan, or those known so
                far.

        Raises:
            ValueError: it has another placement, or cannot run.
        """
        if isinstance(schedule, Plan):
            costs = costs or schedule.timeline.costs
            schedule = schedule.schedule
        if not isinstance(schedule, Schedule):
            raise ValueError(f"adopt takes a zbpipe.Schedule, for example of zbpipe.generate, got {schedule!r}")
        checks.require_same_placement(schedule, self.placement)
        checks.require_pairs(schedule, _torch.stages_of(self))
        if costs is not None:
            self._costs = costs
            self._lowered.clear()
            self._made.clear()
        self._adopted[schedule.num_microbatches] = schedule
        if schedule.num_microbatches == _torch.num_microbatches(self):
            self._use(schedule)
        else:
            checks.require_runnable(schedule)

    def load_table(self, file: str) -> None:
        """Adopt the computations of a CSV file: what torch's `_load_csv` does here."""
        self.adopt(Schedule.from_csv(read_text(file), name=str(file)))

    def prepare(self, *microbatches: int) -> None:
        """Make what steps with so many microbatches run, so that the first of them does not wait for it.

            schedule.prepare(8, 12)

        Each rank may do it by itself: it sends no message.

        Raises:
            ValueError: numbers below 1, or there is no schedule for a number (see `adopt`).
        """
        before = _torch.num_microbatches(self)
        try:
            for number in microbatches:
                self._take_microbatches(number)
        finally:
            self._take_microbatches(before)

    def remake(self, costs: CostModel) -> None:
        """Make what was not adopted anew, for these costs. All ranks have to call this."""
        self._costs = costs
        self._lowered.clear()
        self._made.clear()
        self._use(self.for_microbatches(_torch.num_microbatches(self)))

    def for_microbatches(self, number: int) -> Schedule:
        """What a step with so many microbatches runs: what was adopted for it, else what is made for it.

        It is made at the first such step.

        Raises:
            ValueError: there is no such schedule, for example because the one that runs is a table.
        """
        if number in self._adopted:
            return self._adopted[number]
        if number not in self._made:
            self._made[number] = self.make_for_microbatches(number)
        return self._made[number]

    def make_for_microbatches(self, number: int) -> Schedule:
        """The schedule for another number of microbatches, the same on all ranks."""
        algorithm = self._algorithm
        if algorithm.table is not None and number != algorithm.table.num_microbatches:
            raise ValueError(
                f"{algorithm.name} is a table for {algorithm.table.num_microbatches} microbatches, but a step has"
                f" {number}: let the schedule adopt one for this number before, or build it by a name"
            )
        return self.made_for(self._costs, runs_ahead=self._validation is not None, microbatches=number)

    @_without_collections()
    def _take_microbatches(self, number: int) -> None:
        """Make the next step one of so many microbatches."""
        number = checks.require_count("microbatches", number)
        before = _torch.num_microbatches(self)
        if number == before:
            return
        schedule = self.for_microbatches(number)
        _torch.use_microbatches(self, number)
        try:
            self._use(schedule)
        except ValueError:
            _torch.use_microbatches(self, before)
            _torch.use_lists(self, self._running.lists)
            raise

    def _use(self, schedule: Schedule) -> None:
        """Run it from the next step on; it has the number of microbatches of that step."""
        if schedule not in self._lowered:
            receives = self._lower(schedule)
            self._lowered[schedule] = _Lowered(_torch.lists_of(self), receives)
            if self._split and any(op.kind is OpKind.I for ops in schedule for op in ops):
                self._split()
                self._split = None
            checks.require_pairs(schedule, _torch.stages_of(self))
        self._running = self._lowered[schedule]
        self.receives = self._running.receives
        _torch.use_lists(self, self._running.lists)
        self.schedule = schedule
        self._copy_beside(schedule)

    def _copy_beside(self, schedule: Schedule) -> None:
        """Run the schedule's copies beside its computations."""
        stages = _torch.stages_of(self)
        if schedule.has_copies and self._copies is None:
            self._copies = Copies(self, copier_for(_torch.device_of(stages[0])))
            # What would undo it has to live as long as it lasts.
            self._unwrap = _torch.wrap_compute(self, self._copies.around)
        if self._copies is not None:
            self._copies.follow(simulate(schedule, self._costs or passes.unknown_costs(self.placement)))

    def _lower(self, schedule: Schedule) -> Receives:
        """Have torch lower it, and place its receives; returns when they are posted."""
        checks.require_runnable(schedule)
        schedule = schedule.computations
        _torch.lower(self, schedule)
        costs = self._simulated_costs()
        receives = self._asked_receives or best_receives(schedule, costs, self.transport)
        rows = passes.place_receives(_torch.rows_of(self), receives, simulate(schedule, costs))
        if self._frees_sends_early:
            rows = passes.free_sends_early(passes.with_waits(rows), self.placement)
        checks.require_sound_messages(rows, schedule)
        _torch.use_rows(self, rows)
        return receives

    def settle(self) -> None:
        """Before the first step, on all ranks at once: adopt another schedule if the ranks know more together."""

    def initialize_stages(self, *args: Any, **kwargs: Any) -> None:
        """Before the first step, on all ranks at once: learn shapes, and compile."""
        if _torch.is_set_up(self):
            return
        with ExitStack() as kept:
            # A loss or a layer that calls `backward` itself leaves gradients of what is in memory.
            for stage in _torch.stages_of(self):
                kept.enter_context(_torch.without_gradients(stage.submod))
            super().initialize_stages(*args, **kwargs)
        self.sizes.are_set_up = True
        if _torch.trains(self) and not self._is_warm:
            self._is_warm = True
            warm_up(self, *args, **kwargs)
        for stage in _torch.stages_of(self):
            forget_eager_calls(stage.submod)

    def step(self, *args: Any, target: Any = None, microbatches: int | None = None, **kwargs: Any) -> Any:
        """One training step, with torch's arguments; the batch is split into equal microbatches.

        Args:
            args: torch's, likewise `kwargs`.
            target: of the batch, on the rank with the last stage.
            microbatches: in how many this step splits its batch, if not in `n_microbatches`; the same on all ranks.
                Microbatches may then have other shapes than those of the first step, too. The ranks compare both
                before such a step. Microbatches that are split already (torch's `kwarg_mbs`) say their number.

        Raises:
            ValueError: before anything is sent, for a batch that the number of microbatches does not divide, other
                shapes than those of the first step without `microbatches=`, no input for stage 0, no target for the
                last stage, no loss_fn, or a `microbatches` that is not the same on all ranks.
            PipelineError: this step, or an earlier one, failed on this rank or on another one.
        """
        microbatches = microbatches_of(self, microbatches, kwargs)
        with self._failures.begun(), self.sizes.begun(microbatches):
            try:
                self._take_microbatches(self.sizes.usual if microbatches is None else microbatches)
                with self._refused_by_all():
                    checks.require_loss_and_batch(self, (*args, *kwargs.values()), target)
                    if _torch.trains(self) and not self._models_are_checked:
                        checks.require_trainable(_torch.stages_of(self))
                    return super().step(*args, target=target, **kwargs)
            finally:
                self.abandoned_by = None
                self._take_microbatches(self.sizes.usual)

    def run_microbatches(self, args: Any, kwargs: Any, targets: Any, *more: Any, **more_by_name: Any) -> None:
        """One step, of microbatches that are split already: what cannot run is refused, what fails is explained."""
        stages = _torch.stages_of(self)
        checks.require_microbatches_alike(self, args, kwargs, targets)
        if self.sizes.agree(self, args):
            self._is_warm = False
        checks.require_known_shapes(self, args)
        with self._failures.named(self, self.schedule.name):
            if self._begins_with_agreement:
                if not self._running.is_agreed:
                    self.settle()
                agreement.require_same(self, self.schedule.name, stages[0].group, stages[0].device)
                self._running.is_agreed = True
            if _torch.trains(self) and not self._models_are_checked:
                if _torch.has_split_backward(self):
                    split.require_no_early_reduction(stages)
                    split.require_memory_that_lasts(stages)
                ties.warn_if_parted(stages, self.placement)
                self._models_are_checked = True
            self._pass_on_unfreezing()
            if self._copies is not None:
                self._copies.begin_step()
            self._validated(
                lambda: super(RegisteredSchedule, self).run_microbatches(args, kwargs, targets, *more, **more_by_name)
            )

    @contextmanager
    def _refused_by_all(self) -> Iterator[None]:
        """If this rank refuses the step within, before its messages begin, the others refuse it, too."""
        try:
            yield
        except (PipelineError, RefusedStepError):
            raise
        except Exception as error:
            comparison = self.sizes.comparison
            # Where all ranks compare the step's size, they learn of it there.
            if not comparison.is_alone and (comparison.has_answered or not self.sizes.is_asked):
                self._refuse(error)
            raise

    def _refuse(self, error: Exception) -> None:
        stage, name = _torch.stages_of(self)[0], self.schedule.name
        self._failures.refuse(error, name)
        # The others run a usual step, or all refuse this one.
        self._take_microbatches(self.sizes.usual)
        self.sizes.return_to_usual(self)
        if self._begins_with_agreement:
            agreement.refuse(stage.group, stage.device)
        elif _torch.can_send_marks(stage):
            self._pass_on_unfreezing()
            self.abandoned_by = error
            del error  # it comes back with a traceback that holds this frame
            self.leave_out_all()
            with suppress(Exception), self._failures.named(self, name):
                self._validated(lambda: super(RegisteredSchedule, self).run_microbatches(None, None, None))
        else:
            self._failures.end_by_refusal()

    @property
    def _begins_with_agreement(self) -> bool:
        """Whether all ranks compare what they run before the messages of the next step: before torch sets up any."""
        return not (self._running.is_agreed and _torch.is_set_up(self))

    def _pass_on_unfreezing(self) -> None:
        """Where the model begins with frozen stages, ranks tell the next one whether that is still so.

        Only the rank of a stage sees that its parameters are to be trained now. Then gradients have to come back from
        the stage after it, which has none to give as the messages are set up.
        """
        stages, comparison = _torch.stages_of(self), self.sizes.comparison
        if not _torch.trains(self) or not _torch.is_set_up(self) or not _torch.can_infer_shapes(self):
            return
        own = {stage.stage_index for stage in stages}
        is_unfrozen = False
        for stage in stages:
            index, has_none = stage.stage_index, _torch.is_without_gradients(stage, "inputs")
            if index - 1 not in own:
                is_unfrozen = has_none and not comparison.is_alone and comparison.ask_previous(index)
            if has_none and is_unfrozen:
                _torch.give_gradients(stage, "inputs")
            if _torch.is_without_gradients(stage, "outputs"):
                if is_unfrozen := is_unfrozen or _torch.is_unfrozen(stage):
                    _torch.give_gradients(stage, "outputs")
                if index + 1 not in own and not comparison.is_alone:
                    comparison.tell_next(index + 1, is_unfrozen)

    def tell_why_abandoned(self, error: Exception) -> None:
        self._failures.tell(error, self, self.schedule.name)

    def ask_why_abandoned(self) -> Exception | None:
        return self._failures.why_abandoned()

    def validate_with(self, validation: Validation) -> None:
        """Run ahead of `validation` in each step that begins while it is pending: `zbpipe.OptimizerStep` calls this.

        A schedule that can be made for this is made again, unless another one was adopted.
        """
        self._validation = validation
        if (schedule := self._made_to_run_ahead()) != self.schedule:
            self.adopt(schedule)

    @property
    def optimizer_steps(self) -> dict[str, int]:
        """How many of each kind `zbpipe.OptimizerStep` has made; empty without it."""
        return {} if self._validation is None else asdict(self._validation.counts)

    @property
    def runs_ahead(self) -> bool:
        """Whether any rank runs a part of its list before the last optimizer step is validated."""
        return not self.schedule.has_copies and any(each.kind == "F" for row in self._cut().before for each in row)

    def gain_of_running_ahead(self) -> float:
        """The share of a step that this saves, as simulated with the costs, or with equal times.

        None with copies to the host, which would have to be undone.
        """
        schedule = self._made_to_run_ahead()
        return 0.0 if schedule.has_copies else gain(schedule, self._simulated_costs())

    def _made_to_run_ahead(self) -> Schedule:
        """The one that runs, unless it can be made for this and is still the one that was made."""
        can_be_made = "runs_ahead" in self._algorithm.keywords
        number = _torch.num_microbatches(self)
        if can_be_made and self.schedule == self.made_for(self._costs, microbatches=number):
            return self.made_for(self._costs, runs_ahead=True, microbatches=number)
        return self.schedule

    def finish_optimizer_step(self) -> None:
        """Wait until the last optimizer step is validated."""
        if self._validation is not None and self._validation.is_pending:
            self._validation.finish()

    def _validated(self, run: Callable[[], None]) -> None:
        """A step that begins before the last optimizer step is validated, and begins again if that did not count."""
        validation, kept = self._validation, self._kept_gradients()
        pends = validation is not None and validation.is_pending and _torch.trains(self)
        if validation is None or not pends or kept or not self.runs_ahead:
            self.finish_optimizer_step()
            with _torch.saved_from_scaling(self, kept):
                run()
            return
        random = RandomState.now(_torch.device_of(_torch.stages_of(self)[0]))
        if not _torch.run_ahead(self, self._cut(), validation.verdict, run):
            validation.redo()
            random.restore()
            run()

    def _kept_gradients(self) -> list[Tensor]:
        """Those that earlier steps have left, if the end of this step divides all gradients by its microbatches."""
        if not (self.scale_grads and _torch.trains(self)):
            return []
        return _torch.kept_gradients(stage.submod for stage in _torch.stages_of(self))

    def _cut(self) -> RunAhead:
        if self._running.ahead is None:
            rows = _torch.rows_of(self)
            cut = RunAhead.of(passes.with_waits(rows), ahead_of(self.schedule, self._simulated_costs()))
            if findings := cut.findings():
                raise RuntimeError(f"{self.schedule.name} cannot run ahead: {findings[0]}")
            self._running.ahead = cut
        return self._running.ahead

    def _simulated_costs(self) -> CostModel:
        return self._costs or passes.unknown_costs(self.placement)


def list_for_visualizer(source: str | Schedule, mocks: Any, n_microbatches: int) -> _torch.ScheduleRuntime:
    """What torch's schedule visualizer shows of a schedule. It cannot run.

    Args:
        source: the schedule's name, or itself.
        mocks: of its stages, at least two a rank whatever the schedule has, unless the class is for one.
        n_microbatches: of a step.
    """
    stages = list(mocks) if isinstance(mocks, (list, tuple)) else [mocks]
    is_asked = registry.lookup(source).any_stages_per_rank or len(stages) > 2
    per_rank = len(stages) if is_asked else None
    made = registry.generate(source, stages[0].group_size, n_microbatches, stages_per_rank=per_rank)
    return _torch.list_only(stages, made)


def microbatches_of(schedule: RegisteredSchedule, asked: int | None, arguments: Mapping[str, Any]) -> int | None:
    """The number of microbatches that a step is asked for; None for the usual one.

    Args:
        schedule: whose step it is.
        asked: by `microbatches=`.
        arguments: of the step; a framework that splits batches gives `kwarg_mbs` on all ranks.
    """
    split = arguments.get("kwarg_mbs")
    if asked is None and isinstance(split, list) and split and schedule.sizes.are_unusual(split):
        return len(split)
    return asked


class ScheduleZBH1(RegisteredSchedule):
    """ZB-H1, one stage a rank.

        schedule = zbpipe.ScheduleZBH1(stage, n_microbatches=8, loss_fn=loss_fn)

    See `zbpipe.algorithms.zbh1` for its definition.
    """

    schedule_name = "ZBH1"


class ScheduleZBH2(RegisteredSchedule):
    """ZB-H2, one stage a rank.

        schedule = zbpipe.ScheduleZBH2(stage, n_microbatches=8, loss_fn=loss_fn)

    See `zbpipe.algorithms.zbh2` for its definition.
    """

    schedule_name = "ZBH2"


class ScheduleZB1P(RegisteredSchedule):
    """ZB-1p, one stage a rank.

        schedule = zbpipe.ScheduleZB1P(stage, n_microbatches=8, loss_fn=loss_fn)

    See `zbpipe.algorithms.zb1p` for its definition.
    """

    schedule_name = "ZB1P"


class ScheduleZB2P(RegisteredSchedule):
    """ZB-2p, one stage a rank.

        schedule = zbpipe.ScheduleZB2P(stage, n_microbatches=8, loss_fn=loss_fn)

    See `zbpipe.algorithms.zb2p` for its definition.
    """

    schedule_name = "ZB2P"


class ScheduleZBV(RegisteredSchedule):
    """ZB-V, two stages a rank in a V.

        schedule = zbpipe.ScheduleZBV(stages, n_microbatches=8, loss_fn=loss_fn)

    See `zbpipe.algorithms.zbv` for its definition.
    """

    schedule_name = "ZBV"


class ScheduleVHalf(RegisteredSchedule):
    """V-Half, two stages a rank in a V.

        schedule = zbpipe.ScheduleVHalf(stages, n_microbatches=8, loss_fn=loss_fn)

    See `zbpipe.algorithms.v_half` for its definition.
    """

    schedule_name = "VHalf"


class ScheduleVMin(RegisteredSchedule):
    """V-Min, two stages a rank in a V.

        schedule = zbpipe.ScheduleVMin(stages, n_microbatches=8, loss_fn=loss_fn)

    See `zbpipe.algorithms.v_min` for its definition.
    """

    schedule_name = "VMin"
