"""Orders in which ranks take their turns: `python tests/interleavings.py` runs a million of them.

An interleaving is one training step of all ranks, on torch's executor with zbpipe's schedules, in one order of all
computations, sends, receives, ends of messages, and accesses to the store. The stages compute nothing. A step has to
end on all ranks, with the right messages. If one does not, this prints the case and the choices. Four in five of the
million run the lists alone: actions and queues of messages, without an executor.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import cycle, islice, product
from multiprocessing import get_context
from random import Random
from typing import Any, NamedTuple, cast

import torch
from fifo import BACKENDS
from queued_messages import Lists
from turns import CLOSED, Choices, TokenStage, Turns

import zbpipe
from zbpipe import simulate
from zbpipe.costs.model import Receives, Transport
from zbpipe.runtime._torch import pipelining
from zbpipe.schedule import registry
from zbpipe.simulator.passes import add_messages, add_waits, default_costs, free_sends_early, place_receives
from zbpipe.simulator.simulation import best_receives

TRANSPORTS = dict(zip(BACKENDS, ("one queue", "queue per peer", "queue per peer"), strict=True))
"""For each kind of queues, the transport for which lists are made."""


class Case(NamedTuple):
    """A pipeline and its queues."""

    schedule: str
    """A name, or the path of a table."""
    ranks: int
    microbatches: int
    queues: str = "fifo_one_queue"
    receives: Receives | None = None
    store_ends: bool = False
    """Whether the job's store ends with rank 0, as without torchrun."""
    interrupts: bool = True
    """Whether waits can be interrupted, as over gloo. Over NCCL a process ends instead."""


class FoundError(AssertionError):
    """An order of turns in which a step fails."""


class Pipelines:
    """The ranks' schedules."""

    def __init__(self, case: Case, **options: Any) -> None:
        self.case, self.options = case, options
        self.turns = Turns(case.ranks, BACKENDS[case.queues])
        self.turns.store_is_in_rank_0 = case.store_ends
        self.turns.interrupts = case.interrupts
        self.turns.most = 1000 * (case.microbatches + 10) * case.ranks
        self.rank_of = registry.resolve(case.schedule).place(case.ranks).rank_of
        self.schedules: list[Any] = []

    @contextmanager
    def running(self) -> Iterator[Pipelines]:
        with self.turns.instead_of_processes():
            self.schedules = self.run(self._build)
            yield self

    def _build(self, rank: int) -> Any:
        number, case = len(self.rank_of), self.case
        stages = [TokenStage(self.turns, index, number) for index in range(number) if self.rank_of[index] == rank]
        options = {"transport": TRANSPORTS[case.queues], "receives": case.receives} | self.options
        make, loss = zbpipe.build_pipeline_schedule, lambda output, target: output.sum().requires_grad_()
        return make(case.schedule, stages, case.microbatches, loss, split_backward="autograd", **options)

    def run(self, job: Callable[[int], Any], choices: Choices | None = None) -> list[Any]:
        jobs = [lambda rank=rank: job(rank) for rank in range(self.case.ranks)]
        found = self.turns.run(jobs, choices or Choices())  # type: ignore[arg-type]
        for each in found:
            if isinstance(each, AssertionError):
                raise each
        return found

    def step(self, rank: int, rows: int | None = None, **given: Any) -> None:
        batch = torch.zeros(rows or self.case.microbatches, 1)
        is_first, is_last = rank == self.rank_of[0], rank == self.rank_of[-1]
        self.schedules[rank].step(*([batch] if is_first else []), target=batch if is_last else None, **given)

    def step_twice(self, rank: int) -> None:
        self.step(rank)
        self.step(rank)

    def all_stages(self) -> Iterator[TokenStage]:
        stages = (stage for schedule in self.schedules for stage in pipelining.stages_of(schedule))
        return cast(Iterator[TokenStage], stages)

    def train(self, choices: Choices) -> None:
        """A step of all ranks, which has to be right."""
        for stage in self.all_stages():
            stage.weights_of.clear()
        for error in self.run(self.step, choices):
            if error is not None:
                raise error
        for stage in self.all_stages():
            assert sorted(stage.weights_of) == list(range(self.case.microbatches)), "some W are missing"
            assert not [*stage.fwd_cache, *stage.dw_runner], "something is left"
        assert not self.turns.network.count_pending(), "messages are left"


Trial = Callable[[Pipelines, Choices], None]
"""Runs one step, and raises if it does not end as it has to."""


def explore(case: Case, choices: Iterable[Choices]) -> Iterator[Choices]:
    """Train with each of the choices, one step after the other; returns each once its step was right.

    Raises:
        FoundError: a step was not.
    """
    pipelines = Pipelines(case)
    with pipelines.running():
        pipelines.train(Choices())
        for each in choices:
            try:
                pipelines.train(each)
            except Exception as error:
                raise FoundError(
                    f"{case} fails with Choices({each.deviations}), maybe after earlier steps: {error!r}"
                ) from error
            yield each


def try_out(case: Case, choices: Choices, trial: Trial) -> None:
    """Run this trial after one step of new pipelines.

    Raises:
        FoundError: it failed.
    """
    try:
        with Pipelines(case).running() as pipelines:
            pipelines.train(Choices())
            trial(pipelines, choices)
    except Exception as error:
        raise FoundError(f"{case} fails with Choices({choices.deviations}): {error!r}") from error


class Search:
    """All choices that differ in few turns from the first ones, those with fewest first."""

    def __init__(self) -> None:
        self._to_do: list[dict[int, int]] = [{}]

    def __iter__(self) -> Iterator[Choices]:
        while self._to_do:
            later: list[dict[int, int]] = []
            for given in self._to_do:
                choices = Choices(given)
                yield choices
                begin = max(given, default=-1) + 1
                for turn, (_, number) in enumerate(choices.made[begin:], begin):
                    later += [{**given, turn: other} for other in range(1, number)]
            self._to_do = later


# Faults. Each trial brings one about, and checks how all ranks end.


def _require_ends(ends: Sequence[Any], *causes: str) -> None:
    """By rank: a pattern that its error has; "" for none."""
    for rank, (end, cause) in enumerate(zip(ends, causes, strict=True)):
        found = f"{type(end).__name__}: {end}" if end is not None else ""
        assert re.search(cause, found) if cause else not found, f"rank {rank} ends with {found!r}, not with {cause!r}"


def kill(rank: int, turn: int) -> Trial:
    """A rank ends without a word at this turn of it in a step. The others name it, in this step or the next one."""

    def trial(pipelines: Pipelines, choices: Choices) -> None:
        pipelines.train(Choices())  # unlike the first step
        pipelines.turns.kill = rank, 1 + turn % pipelines.turns.taken[rank]
        ends = pipelines.run(pipelines.step_twice, choices)
        # Without the store each tells only whom it has lost itself.
        lost = r"\d" if pipelines.turns.store.is_gone else rank
        causes = [f"PipelineError: .*{CLOSED}: rank {lost}"] * len(ends)
        causes[rank] = ""
        _require_ends(ends, *causes)

    return trial


def fail(*places: tuple[int, str, int]) -> Trial:
    """These ops fail, by stage, kind and microbatch. All ranks name the same one as the first."""

    def trial(pipelines: Pipelines, choices: Choices) -> None:
        for stage in pipelines.all_stages():
            stage.fails_in = {(kind, microbatch) for index, kind, microbatch in places if index == stage.stage_index}
        ends = pipelines.run(pipelines.step_twice, choices)
        first = re.search(
            r"rank (\d), schedule \w+, action \d+ of \d+ in step \d+, (\w+): ArithmeticError", str(ends[0])
        )
        assert first, f"rank 0 ends with {ends[0]!r}"
        assert first[2] in [f"{stage}{kind}{microbatch}" for stage, kind, microbatch in places], first
        _require_ends(ends, *[rf"PipelineError: (another rank failed first: )?{re.escape(first[0])}"] * len(ends))

    return trial


def refuse(pipelines: Pipelines, choices: Choices) -> None:
    """All ranks refuse a step and run the next one. Then one refuses its batch alone, and all tell so."""

    def step(rank: int, is_alone: bool) -> Exception | None:
        try:
            if not is_alone:
                pipelines.step(rank, microbatches=0)
            pipelines.step(rank, rows=pipelines.case.microbatches + (rank == pipelines.rank_of[0]))
        except (ValueError, zbpipe.PipelineError) as error:
            return error
        return None

    said = pipelines.run(partial(step, is_alone=False), choices)
    assert all("microbatches has to be a whole number" in str(each) for each in said), said
    pipelines.train(Choices())
    ends = pipelines.run(partial(step, is_alone=True), Choices(choices.deviations))
    _require_ends(ends, *["give every step a batch of the same size"] * len(ends))


def forget(pipelines: Pipelines, choices: Choices) -> None:
    """The last rank alone is given a number of microbatches."""
    last = pipelines.case.ranks - 1
    ends = pipelines.run(lambda rank: pipelines.step(rank, **({"microbatches": 2} if rank == last else {})), choices)
    _require_ends(ends, *["PipelineError: .*it got microbatches=2; give all ranks of the pipeline"] * len(ends))


def disagree(pipelines: Pipelines, choices: Choices) -> None:
    """The last rank is given another number of microbatches. All refuse the step, and run the next one."""

    def step(rank: int) -> str:
        number = 2 if rank == pipelines.case.ranks - 1 else 1
        try:
            pipelines.step(rank, rows=2, microbatches=number)
        except ValueError as error:
            return str(error)
        return ""

    said = pipelines.run(step, choices)
    assert all("different microbatches=" in each for each in said), said
    pipelines.train(Choices())


FAULTS: dict[str, tuple[Case, Callable[[Random], Trial]]] = {
    "a rank is killed": (Case("ZBV", 3, 3), lambda random: kill(random.randrange(3), random.randrange(1000))),
    "an op fails": (Case("ZBV", 3, 3), lambda random: fail(_draw_op(random))),
    "two ops fail": (Case("ZBV", 3, 3), lambda random: fail(*_draw_two(random))),
    "a batch is refused": (Case("ZBH2", 3, 2), lambda random: refuse),
    "sizes differ": (Case("VMin", 3, 2), lambda random: disagree),
    "a size is forgotten": (Case("ZBV", 3, 3), lambda random: forget),
}


def _draw_op(random: Random) -> tuple[int, str, int]:
    return random.randrange(6), random.choice("FIW"), random.randrange(3)


def _draw_two(random: Random) -> Sequence[tuple[int, str, int]]:
    """Often two ops that run at about the same time, so that neither rank knows of the other's."""
    return random.choice(([(5, "F", 2), (3, "I", 1)], [_draw_op(random), _draw_op(random)]))


def try_faults(what: str, seeds: Sequence[int]) -> int:
    """Bring this fault about, once with each seed; returns how often."""
    for seed in seeds:
        random = Random(seed)
        case, draw = FAULTS[what]
        trial = draw(random)
        interrupts = seed % 3 != 1 or what == "a rank is killed"
        case = case._replace(queues=[*BACKENDS][seed % 3], store_ends=seed % 2 == 1, interrupts=interrupts)
        try_out(case, Choices(random=random), trial)
    return len(seeds)


# Lists alone, without an executor.


def count_sound(case: Case, number: int) -> int:
    schedule = zbpipe.generate(case.schedule, case.ranks, case.microbatches)
    costs = default_costs(schedule.placement)
    receives = case.receives or best_receives(schedule, costs, Transport.parse(TRANSPORTS[case.queues]))
    rows = add_waits(place_receives(add_messages(schedule), receives, simulate(schedule, costs)))
    lists = Lists(free_sends_early(rows, schedule.placement), case.queues)
    for seed in range(number):
        assert not lists.gets_stuck(Random(seed)), f"{case} gets stuck with seed {seed}"
    return number


# How many, of what.

SCHEDULES = ("ZBH1", "ZBH2", "ZBV", "ZB", "VHalf", "VMin")


def cases(ranks: Iterable[int], microbatches: Iterable[int]) -> list[Case]:
    ways = cycle(Receives)
    sizes = product(SCHEDULES, BACKENDS, ranks, microbatches)
    return [Case(name, p, m, queues, next(ways)) for name, queues, p, m in sizes]


class Part(NamedTuple):
    what: str
    run: Callable[..., int]
    """Returns how many interleavings it ran."""
    args: tuple[Any, ...]


def _run_random(case: Case, number: int) -> int:
    return sum(1 for _ in explore(case, (Choices(random=Random(seed)) for seed in range(number))))


def _search(case: Case, number: int) -> int:
    return sum(1 for _ in islice(explore(case, Search()), number))


def parts(scale: float) -> list[Part]:
    """All of it; a smaller `scale` takes so much less of each."""

    def times(number: int) -> int:
        return max(1, round(number * scale))

    executor, search, lists = "torch's executor, at random", "torch's executor, by search", "lists alone, at random"
    large = [Case(name, 64, 16, queues) for name, queues in product(("ZBH1", "ZBV"), BACKENDS)]
    return [
        *(Part(f"faults: {what}", try_faults, (what, range(times(60)))) for what in FAULTS),
        *(Part(executor, _run_random, (each, times(4))) for each in cases((8,), (8,))),
        *(Part(executor, _run_random, (each, times(100))) for each in cases((3, 4), (4,))),
        *(Part(executor, _run_random, (each, times(2000))) for each in cases((2,), (1, 2, 3))),
        *(Part(executor, _run_random, (each, 1)) for each in large[:1] if scale >= 1),
        *(Part(search, _search, (each, times(5000))) for each in cases((2,), (1,))),
        *(Part(search, _search, (each, times(400))) for each in cases((3,), (2,))),
        *(Part(lists, count_sound, (each, times(12_000))) for each in cases((2,), (1, 2, 4))),
        *(Part(lists, count_sound, (each, times(2000))) for each in cases((3, 4), (4, 8))),
        *(Part(lists, count_sound, (each, times(200))) for each in cases((8,), (16,))),
        *(Part(lists, count_sound, (each, times(20))) for each in large),
    ]


def _run(part: Part) -> tuple[Part, int | str, float]:
    began = time.process_time()
    torch.set_num_threads(1)
    try:
        found: int | str = part.run(*part.args)
    except AssertionError as error:
        found = str(error)
    return part, found, time.process_time() - began


def main() -> int:
    """Print how many of each kind ran, and what failed; returns how many parts failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the interleavings")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    began, failed = time.monotonic(), 0
    numbers: Counter[str] = Counter()
    seconds: dict[str, float] = defaultdict(float)
    with get_context("fork").Pool(arguments.processes) as pool:
        for part, found, took in pool.imap_unordered(_run, parts(arguments.scale)):
            seconds[part.what] += took
            if isinstance(found, str):
                failed += 1
                print(f"FAILED {part.what}: {found}", flush=True)
            else:
                numbers[part.what] += found
    for what, number in numbers.items():
        print(f"{number:9,} {what} ({seconds[what]:.0f} s of CPU)")
    print(f"{numbers.total():9,} interleavings in {time.monotonic() - began:.0f} s, {failed} parts failed")
    return failed


if __name__ == "__main__":
    sys.exit(min(main(), 1))
