"""The arguments of commands: costs, a memory limit, and a schedule by name, which is made, validated and simulated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click
from click.core import ParameterSource

from zbpipe.cli import base
from zbpipe.cli.base import EXISTING, one_line, options, options_of, parse_with, progress_line
from zbpipe.cli.jobs import JobOptions, job_options, numbers
from zbpipe.costs.file import load_costs
from zbpipe.costs.job import SPELLINGS, CostsOf, JobCosts, MemoryLimit, memory_of_1f1b
from zbpipe.costs.layers import LayerCosts
from zbpipe.costs.model import CostModel, FillWaits, Link, Transport
from zbpipe.costs.numbers import MOST, amount, is_amount
from zbpipe.costs.transformer import Checkpointing, typical_costs, typical_times
from zbpipe.schedule.ir import Placement, Schedule
from zbpipe.schedule.registry import USUAL_STAGES, Algorithm, resolve, schedules, stages_for
from zbpipe.simulator.simulation import how_runs, simulate
from zbpipe.simulator.timeline import Timeline
from zbpipe.simulator.validation import validate

if TYPE_CHECKING:
    from zbpipe.views.report import ComparedSchedule

Times = tuple[float, float, float]


@dataclass(frozen=True)
class Costs:
    of: CostsOf
    words: str
    """Source of times and memory, for people."""
    job: JobCosts | None = None
    """Content of `--costs-file`."""
    file: Path | None = None
    checkpointing: Checkpointing | None = None
    size: tuple[int, int] | None = None
    """Ranks and microbatches of the job that `--gpus` describes, its transport, and the memory left by its weights."""
    usual: Transport = Transport.IDEAL
    room: tuple[float, ...] | None = None
    placement: Placement | None = None
    """ZB's in that job, also for the stages per rank of ZBLoop."""
    sizes: tuple[Any, ...] = ()
    """Of the microbatches, from `--sizes`."""

    def having(self, **given: Any) -> Costs:
        """These costs with other `sizes` or `fill_waits`."""
        job = self.job and replace(self.job, costs=replace(self.job.costs, **given))
        of = job.on if job else lambda placement: replace(self.of(placement), **given)
        return replace(self, of=of, job=job, sizes=given.get("sizes", self.sizes))

    def has(self, placement: Placement) -> bool:
        try:
            self.of(placement)
        except ValueError:
            return False
        return True

    def stages_of(self, algorithm: Algorithm, ranks: int) -> int | None:
        """Stages per rank, where no option names them: those of the job or of the cost file, else the usual number."""
        if not algorithm.chooses_stages:
            return None
        if self.job is None:
            return len(self.placement.stages_on(0)) if self.placement else USUAL_STAGES
        costs = self.job.costs
        each = stages_for(len(costs.layers), ranks)[0] if isinstance(costs, LayerCosts) else costs.num_stages // ranks
        return max(each, 1)

    def ranks(self, given: int | None) -> int | None:
        """The given number of ranks, which has to fit the cost file; else the file's, or the job's."""
        if self.size is not None:
            return self.size[0]
        if self.job is None:
            return given
        if given is None:
            return self.job.placement.num_ranks if self.job.placement else None
        self.job.require_ranks(given)
        return given

    def require_size(self, ranks: int | None, microbatches: int | None) -> tuple[int, int]:
        """Ranks and microbatches, those of the costs or the given ones."""
        ranks, microbatches = self.ranks(ranks), self.size[1] if self.size else microbatches or len(self.sizes) or None
        if ranks is None or microbatches is None:
            option = "'-p' / '--ranks'" if ranks is None else "'-m' / '--microbatches'"
            raise click.UsageError(f"Missing option {option}", click.get_current_context())
        if self.sizes and microbatches != len(self.sizes):
            raise ValueError(f"--sizes has {len(self.sizes)} numbers, not {microbatches}: give one for each microbatch")
        return ranks, microbatches

    def transport(self, chosen: Transport | None) -> Transport:
        return chosen or (self.job and self.job.transport) or self.usual

    @property
    def for_limits(self) -> CostModel | LayerCosts | CostsOf:
        return self.job.costs if self.job else self.of

    def limit(self, given: MemoryLimit | None) -> MemoryLimit | None:
        """The given limit, else that of the cost file or the job's device."""
        return given or MemoryLimit.parse(self.job.memory_limit if self.job else self.room)

    def limits(self, given: MemoryLimit | None, ranks: int, microbatches: int) -> tuple[float, ...] | None:
        """The limit of each rank, in the unit of the costs."""
        limit = self.limit(given)
        return limit.resolve(self.for_limits, ranks, microbatches) if limit else None

    def baseline(self, ranks: int, microbatches: int) -> float | None:
        """1F1B's memory in the unit of the costs; None if the file's stages cannot be joined into one per rank."""
        costs = self.for_limits
        if isinstance(costs, CostModel) and costs.num_stages % ranks:
            return None
        return memory_of_1f1b(costs, ranks, microbatches)


_OF_COSTS = ("costs", "comm", "checkpointing", "host", "waits")


def typical(
    times: Times | None, comm: float, checkpointing: str, host: Link | None, waits: tuple[float, float]
) -> Costs:
    f, i, w = typical_times(checkpointing) if times is None else times
    copies = "" if host is None else f"; {host.bandwidth:.6g} to the host"
    what = "times and memory" if times is None else "memory"
    how = Checkpointing(checkpointing)
    return Costs(
        partial(typical_costs, checkpointing=checkpointing, times=times, comm=comm, host=host, waits=waits),
        f"F {f:.6g}, I {i:.6g}, W {w:.6g}, transfer {comm:.6g}; {what} typical of a transformer {how.words}{copies}",
        checkpointing=how,
    )


def _require_alone(context: click.Context, rival: str, *others: str) -> None:
    """Raise for an option among these, if it is given: `rival` has its own value."""
    for each in context.command.params:
        if each.name in others and context.get_parameter_source(each.name) is not ParameterSource.DEFAULT:
            words = f"{each.opts[0]} and {rival} exclude each other, because the latter has its own: omit one"
            raise click.UsageError(words, context)


def _of_job(job: JobOptions, context: click.Context) -> Costs:
    """The costs of a job, as `zbpipe estimate` counts them."""
    from zbpipe.estimation.devices import find
    from zbpipe.estimation.estimate import job_costs

    _require_alone(context, "--gpus", *_OF_COSTS, "costs_file", "ranks", "microbatches")
    if job.device is None:
        raise click.UsageError("name the --device of the job, for example H100", context)
    workload = job.workload()
    size = workload.degrees.pipeline, workload.microbatches
    device = find(job.device)
    of, zb, placement, room = job_costs(workload, device, **job.rates)
    words = f"costs of {workload.name} ({workload.degrees}) on {device.name}; memory limit: what the weights leave"
    words += "" if zb.name == "ZB" else f"; a job with ZB runs {zb.name}"
    return Costs(of, words, None, None, workload.checkpointing, size, device.transport, room, placement)


def _times(text: str) -> Times | None:
    if text == "typical":
        return None
    try:
        f, i, w = map(float, text.split(","))
    except ValueError:
        if text.endswith((".toml", ".json")):
            raise ValueError(f"{text!r} names a file; write `--costs-file {text}`") from None
        raise ValueError(f"{text!r} is not three numbers; write for example 1,1,0.8, or typical") from None
    # Pictures are scaled by the longest time.
    if not all(map(is_amount, (f, i, w))) or max(f, i, w) < 1 / MOST:
        raise ValueError(
            f"{text!r} needs numbers between 0 and {MOST:g}, at least one above 0; write for example 1,1,0.8"
        )
    return f, i, w


def _shares(text: str) -> tuple[float, float]:
    shares = numbers(text, what := "two shares from 0 to 1: write for example 0.26,0.25")
    if len(shares) != 2 or not all(0 <= each <= 1 for each in shares):
        raise ValueError(f"{text!r} is not {what}")
    return shares[0], shares[1]


def _sizes(text: str) -> tuple[Any, ...]:
    """The sizes of microbatches. The costs of stages check them."""
    try:
        pairs = [tuple(map(float, each.split(":"))) for each in text.split(",")]
    except ValueError:
        raise ValueError(
            f"{text!r} are no sizes: write tokens, like 4000,3000, or with squares 4000:9e6,3000:5e6"
        ) from None
    return CostModel((1,), (1,), (1,), (1,), sizes=tuple(pair if pair[1:] else pair[0] for pair in pairs)).sizes


sizes_option = click.option(
    "--sizes",
    callback=parse_with(_sizes),
    metavar="N,...",
    help="Tokens of each microbatch, or tokens:squares, with the sum of its samples' squared lengths. Costs apply to a"
    " job's usual microbatch, or else to one of mean size.",
)


def cost_options(times: str = "typical", *, of_job: bool = False) -> Callable[..., Any]:
    """Decorator for the cost options, which the command gets as one argument `costs`. `of_job`: include a job's."""
    add_options = options(
        click.option(
            "--costs",
            metavar="F,I,W",
            callback=parse_with(_times),
            default=times,
            show_default=True,
            help="Seconds (or any other unit) of F, I (with recomputation) and W of one microbatch on a rank; or"
            " `typical`, those of a transformer with the chosen checkpointing.",
        ),
        click.option(
            "--checkpointing",
            type=click.Choice([str(each) for each in Checkpointing]),
            default="selective",
            show_default=True,
            help="Activation checkpointing of a typical transformer, which determines its memory. selective is"
            " TorchTitan's default.",
        ),
        click.option(
            "--comm",
            type=float,
            callback=parse_with(partial(amount, "a transfer", "comm")),
            default=0.0,
            show_default=True,
            help="Seconds of a transfer between two ranks.",
        ),
        click.option(
            "--host-bandwidth",
            "host",
            type=float,
            callback=parse_with(lambda bandwidth: Link(bandwidth=bandwidth)),
            metavar="X",
            help="For schedules that offload: bandwidth to a rank's host, in each direction, per unit of time. Unit:"
            " activations of one microbatch on one rank.",
        ),
        click.option(
            "--costs-file",
            type=EXISTING,
            metavar="FILE",
            help="Measured times, bytes and links of stages or layers (docs/costs-file.md), in place of those options.",
        ),
        click.option(
            "--waits",
            callback=parse_with(_shares),
            default="0,0",
            metavar="F,I",
            help="Shares of F and I in which they wait for collectives of tensor, expert or context parallelism.",
        ),
        click.option(
            "--fill-waits",
            type=click.Choice(get_args(FillWaits)),
            help="Run products of W in these waits (only zbpipe's schedules). own: waits of I and B; all: of F, too"
            " (docs/the-split.md). Default: that of the cost file or job, else off.",
        ),
        sizes_option,
    )

    def add(command: Callable[..., Any]) -> Any:
        @wraps(command)
        def with_costs(*, costs_file: Path | None, job: JobOptions | None = None, **given: Any) -> Any:
            others = {name: each for name in ("sizes", "fill_waits") if (each := given.pop(name)) is not None}
            chosen, context = typical(*map(given.pop, _OF_COSTS)), click.get_current_context()
            if costs_file:
                _require_alone(context, f"--costs-file {costs_file}", *_OF_COSTS)
                loaded = load_costs(costs_file)
                chosen = Costs(loaded.on, f"costs of {costs_file}", loaded, costs_file)
            if job and job.gpus is not None:
                chosen = _of_job(job, context)
            elif job:
                job.require_no_arguments("; name the --gpus of a job of TorchTitan")
            return command(costs=chosen.having(**others) if others else chosen, **given)

        return add_options(job_options(with_costs) if of_job else with_costs)

    return add


def limit_option(what: str, spellings: str = SPELLINGS) -> Callable[..., Any]:
    return click.option(
        "--memory-limit", callback=parse_with(MemoryLimit.parse), metavar="X", help=f"{what}: {spellings}."
    )


memory_limit_option = limit_option("Memory limit of a rank")
fitted_limit_option = limit_option("Memory limit of a rank, for schedules that adapt to it, such as ZB")


@dataclass(frozen=True)
class Request:
    name: str
    """Name of a schedule, or path of a file."""
    ranks: int | None
    microbatches: int | None
    costs: Costs
    stages_per_rank: int | None = None
    memory_limit: MemoryLimit | None = None

    def make(self, transport: Transport | None = None) -> tuple[Schedule, CostModel]:
        """The schedule, which can run, and the costs of its stages."""
        algorithm = resolve(self.name)
        table = algorithm.table
        ranks = self.ranks or (table.placement.num_ranks if table else None)
        microbatches = self.microbatches or (table.num_microbatches if table else None)
        ranks, microbatches = self.costs.require_size(ranks, microbatches)
        stages = self.stages_per_rank or self.costs.stages_of(algorithm, ranks)
        costs = self.costs.of(algorithm.place(ranks, stages))
        limit, limits = self.memory_limit, None
        size = (self.costs.for_limits, ranks, microbatches)
        if limit is not None:
            algorithm.require_limits("--memory-limit")
            limits = MemoryLimit.parse(limit.resolve(*size))
        with limit.explain(*size) if limit else nullcontext():
            how: dict[str, Any] = {"costs": costs, "memory_limit": limits, "transport": transport}
            schedule = algorithm.make(ranks, microbatches, stages_per_rank=stages, **how)
        if findings := validate(schedule):
            more = f" (the first of {len(findings)} findings)" if len(findings) > 1 else ""
            raise ValueError(f"{algorithm.name} cannot run: {findings[0]}{more}; zbpipe.validate lists all findings")
        # A registered function may name its schedule anything, but users look for the name that they typed.
        return replace(schedule, name=algorithm.name), costs

    def simulate(self, transport: Transport) -> Timeline:
        """Timeline of a schedule made for this transport."""
        schedule, costs = self.make(transport)
        how = how_runs(resolve(self.name).source, len(schedule.placement.stages_on(0)))
        return simulate(schedule, costs, transport=transport, **how)


def request_options(times: str = "typical") -> Callable[..., Any]:
    sizes = base.name_argument, base.size_options, base.stages_option
    return options_of("request", Request, *sizes, cost_options(times), fitted_limit_option)


def compare_all(
    ranks: int,
    microbatches: int,
    costs: Costs,
    memory_limit: MemoryLimit | None,
    transport: Transport,
    stages_per_rank: int | None = None,
    *,
    besides: Iterable[Timeline] = (),
    with_period: bool = True,
) -> Iterator[ComparedSchedule]:
    """Figures of the timelines `besides`, and of all named schedules, with the limit and the stages that they can adapt
    to. A schedule that fails is omitted, with a line on stderr."""
    from zbpipe.views.report import ComparedSchedule

    how = costs.limits(memory_limit, ranks, microbatches), costs.baseline(ranks, microbatches), costs.checkpointing

    def figures_of(timeline: Timeline) -> ComparedSchedule:
        return ComparedSchedule.of(timeline, *how, with_period=with_period)

    yield from map(figures_of, besides)
    with progress_line() as show:
        known = schedules().values()
        for number, algorithm in enumerate(known):
            show(f"{number + 1} of {len(known)}: {algorithm.name}")
            given = stages_per_rank if algorithm.any_stages_per_rank else None
            stages = given or costs.stages_of(algorithm, ranks)
            try:
                if costs.job is None or costs.has(algorithm.place(ranks, stages)):
                    limit = memory_limit if "memory_limit" in algorithm.keywords else None
                    request = Request(algorithm.name, ranks, microbatches, costs, stages, limit)
                    yield figures_of(request.simulate(transport))
            except Exception as error:  # a broken function of one installed package must not hide the others
                kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
                click.echo(f"skipped {algorithm.name}: {kind}{one_line(str(error))}", err=True)
