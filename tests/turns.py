"""Ranks as threads of one process. One runs at a time; whose turn is next, a seed or a search chooses.

Turns change at each computation, send, receive, wait, collective and access to the store. A message is over some turns
after both ends have met. Time passes only when nothing else can happen, so each timeout comes at once.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from random import Random
from threading import Lock
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from fifo import spoil
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.pipelining import PipelineStage, schedules

from zbpipe.runtime._torch import pipelining
from zbpipe.runtime.measure import recording, transport
from zbpipe.runtime.ranks import agreement, failures, progress, step_board

TIMEOUT = 60.0
"""Of the process group, in seconds that pass when nothing else can happen."""
CLOSED, LATE = "Connection closed by peer", "Timed out"

Job = Callable[[], Any]


class TooManyTurnsError(AssertionError):
    """The ranks do not come to their end."""


class _DiedError(BaseException):
    """Unwinds the thread of a rank that has died."""


class Choices:
    """Which of several things happens next: the first is that whoever runs goes on, the last ones wake who sleeps."""

    def __init__(self, given: dict[int, int] | None = None, random: Random | None = None) -> None:
        self._given = given or {}
        self._random = random
        self._going_on = random.choice((0.0, 0.5, 0.9)) if random else 0.0
        self.made: list[tuple[int, int]] = []
        """For each turn the choice, and the number of those that there were."""

    def choose(self, awake: int, number: int) -> int:
        """One of the first `number`, of which the first `awake` wake nobody."""
        if self._random is None:
            chosen = min(self._given.get(len(self.made), 0), number - 1)
        elif self._random.random() < self._going_on:
            chosen = 0
        else:
            chosen = self._random.randrange(awake if awake and self._random.random() < 0.95 else number)
        self.made.append((chosen, number))
        return chosen

    @property
    def deviations(self) -> dict[int, int]:
        """The choices but for the first ones, by turn: `given` to make them again."""
        return {turn: chosen for turn, (chosen, _) in enumerate(self.made) if chosen}


class Actor:
    def __init__(self, turns: Turns, rank: int) -> None:
        self.rank = rank
        self.run: Job | None = None
        self.is_over = False
        self.is_ready: Callable[[], bool] = bool  # False
        self.until: float | None = None
        """When it goes on, ready or not."""
        self.baton = Lock()
        self.baton.acquire()
        self._turns = turns
        threading.Thread(target=self._live, daemon=True).start()

    def _live(self) -> None:
        while True:
            self.baton.acquire()
            if self.run is None:
                return
            try:
                self.run()
            except _DiedError:
                pass
            finally:
                self.is_over = True
                self._turns.hand_on()


class Turns:
    def __init__(self, ranks: int, queue_of: Callable[[int, bool], Hashable]) -> None:
        self.ranks = ranks
        self.now = 0.0
        self.dead: set[int] = set()
        self.closed: set[int] = set()
        """Ranks whose connections are closed."""
        self.interrupts = True
        """Whether waits can be interrupted, and see the end of another process: over gloo, not over NCCL."""
        self.kill: tuple[int, int] | None = None
        """A rank, and the turn of its main thread at which it is killed."""
        self.store_is_in_rank_0 = False
        self.most = 100_000
        """Turns within which all have to end."""
        self.taken = [0] * ranks
        """Turns of each main thread."""
        self.network, self.store = Network(self, queue_of), Store(self)
        self._main = [Actor(self, rank) for rank in range(ranks)]
        self._others: list[Actor] = []
        self._ready: list[Actor] = []
        self._blocked: list[Actor] = []
        self._sleeping: list[Actor] = []
        self.has_changed = False
        """Whether a blocked thread may be ready now."""
        self._worlds = [self._make_world(rank) for rank in range(ranks)]
        self._num_keys = [Counter[str]() for _ in range(ranks)]
        self._running = self._main[0]
        self._ended = Lock()
        self._ended.acquire()
        self._error: BaseException | None = None

    def _make_world(self, rank: int) -> Any:
        group = Group(self, rank)
        return SimpleNamespace(
            default_pg=group,
            pg_map={group: ("gloo", self.store)},
            pg_names={group: "turns"},
            pg_group_ranks={group: {each: each for each in range(self.ranks)}},
            pg_backend_config={group: "cpu:gloo"},
            pg_coalesce_state={},
        )

    @contextmanager
    def instead_of_processes(self) -> Iterator[Turns]:
        """Context in which `run` may be called."""
        for each in threading.enumerate():
            if each.name == "zbpipe progress":  # of an earlier test: it would take turns, too
                each.join()
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep)
        thread = lambda target, args=(), **_: _Thread(self, target, args)  # noqa: E731
        patches: list[tuple[Any, dict[str, Any]]] = [
            (distributed_c10d, {"_world": self._worlds[0]}),
            (agreement, {"_num_keys": self._num_keys[0]}),
            (failures, {"time": clock, "Thread": thread}),
            (
                progress,
                {
                    "time": clock,
                    "Thread": thread,
                    "_is_ending": SimpleNamespace(wait=self.sleep),
                    "end_process": self._end_process,
                },
            ),
            (step_board, {"time": clock}),
            (transport, {"time": clock}),
            (schedules, {"record_function": lambda name: nullcontext()}),  # takes a third of the time
            (recording, {"MemoryCounter": lambda device: None}),  # it takes time
            (pipelining, {"has_store": lambda: self.store_is_in_rank_0 and self._running.rank == 0}),
            (pipelining, {"interrupt": self._interrupt}),
        ]
        started = [mock.patch.multiple(module, **new) for module, new in patches]
        for each in started:
            each.start()
        logging.disable(logging.CRITICAL)
        try:
            yield self
        finally:
            logging.disable(logging.NOTSET)
            self.dead = set(range(self.ranks))
            for actor in [each for each in self._others if not each.is_over]:
                self._start(actor)
                self._ended.acquire()
            for actor in (*self._main, *self._others):
                actor.run = None
                actor.baton.release()
            for each in started:
                each.stop()

    def run(self, jobs: Sequence[Job], choices: Choices) -> list[Any]:
        """By rank what its job returned, or the exception with which it ended; None for one that was killed."""
        self._choices, self._error, self.dead, self.closed = choices, None, set(), set()
        self.taken = [0] * self.ranks
        results: list[Any] = [None] * self.ranks
        self._results = results

        def run(rank: int) -> None:
            try:
                results[rank] = jobs[rank]()
            except Exception as error:
                results[rank] = error
                if self.interrupts:
                    self.die(rank)  # its process ends

        for rank, actor in enumerate(self._main):
            actor.run, actor.is_over = partial(run, rank), False
        self._others = [each for each in self._others if not each.is_over]
        self._ready = [*self._main, *self._ready]
        self._start(self._choose())
        self._ended.acquire()
        if self._error is not None:
            raise self._error
        return results

    def _start(self, actor: Actor) -> None:
        self._running = actor
        distributed_c10d._world = self._worlds[actor.rank]  # type: ignore[assignment]
        agreement._num_keys = self._num_keys[actor.rank]
        actor.baton.release()

    def start_thread(self, run: Job) -> Actor:
        actor = Actor(self, self._running.rank)
        actor.run = run
        self._others.append(actor)
        self._ready.append(actor)
        return actor

    def sleep(self, seconds: float) -> None:
        self._running.is_ready, self._running.until = bool, self.now + seconds
        self._let_others_run(self._sleeping)

    def wait(self, is_ready: Callable[[], bool] | None = None, until: float | None = None) -> None:
        actor = self._running
        if actor is self._main[actor.rank]:
            self.taken[actor.rank] += 1
            if self.kill == (actor.rank, self.taken[actor.rank]):
                self.die(actor.rank)
        if is_ready is None or is_ready():
            self._let_others_run(self._ready)
        else:
            actor.is_ready, actor.until = is_ready, until
            self._let_others_run(self._blocked)

    def _let_others_run(self, among: list[Actor]) -> None:
        actor = self._running
        if actor.rank not in self.dead:
            among.insert(0, actor)
            following = self._choose()
            if following is not actor:
                self._start(following)
                actor.baton.acquire()
        if self._error is not None or actor.rank in self.dead:
            raise _DiedError

    def hand_on(self) -> None:
        """Go on with another thread, because the running one has ended."""
        self.has_changed = True
        if all(each.is_over for each in self._main):
            self._ended.release()
        else:
            self._start(self._choose())

    def die(self, rank: int) -> None:
        self.dead.add(rank)
        self._close(rank)
        self.store.is_gone = self.store_is_in_rank_0 and 0 in self.dead
        self.has_changed = True

    def _close(self, rank: int) -> None:
        self.closed.add(rank)
        self.network.close(rank)
        self.has_changed = True

    def _interrupt(self) -> None:
        if self.interrupts:
            self._close(self._running.rank)

    def _end_process(self, error: Exception) -> None:
        self._results[self._running.rank] = error
        self.dead.add(self._running.rank)
        self.has_changed = True
        raise _DiedError

    def _choose(self) -> Actor:
        """Whose turn is next. Messages end before, if that is chosen."""
        choices, network, ready, sleeping = self._choices, self.network, self._ready, self._sleeping
        while True:
            if len(choices.made) > self.most and self._error is None:
                self._error = TooManyTurnsError(f"no end after {self.most} turns")
            if self._error is not None:
                return next(each for each in self._main if not each.is_over)
            if self.has_changed:
                self.has_changed = False
                self._wake(lambda each: each.rank in self.dead or each.is_ready())
            awake = len(ready) + len(network.met)
            number = awake + len(sleeping)
            if not awake:
                self.now = min(each.until for each in (*self._blocked, *sleeping) if each.until is not None)
                self._wake(lambda each: each.until is not None and each.until <= self.now)
                continue
            chosen = choices.choose(awake, number) if number > 1 else 0
            if chosen < len(ready):
                return ready.pop(chosen)
            if chosen >= awake:
                return sleeping.pop(chosen - awake)
            network.end(chosen - len(ready))
            self.has_changed = True

    def _wake(self, is_awake: Callable[[Actor], bool]) -> None:
        for among in (self._blocked, self._sleeping):
            for each in [each for each in among if is_awake(each)]:
                among.remove(each)
                self._ready.append(each)


class _Thread:
    """`threading.Thread`, as far as zbpipe needs it."""

    def __init__(self, turns: Turns, target: Callable[..., object], args: tuple[Any, ...]) -> None:
        self._turns, self._run = turns, lambda: target(*args)

    def start(self) -> None:
        self._actor = self._turns.start_thread(self._run)

    def join(self, timeout: float) -> None:
        self._turns.wait(lambda: self._actor.is_over, self._turns.now + timeout)


class End(dist.Work):
    def __init__(self, turns: Turns, rank: int, peer: int, tensor: Tensor, sends: bool) -> None:
        super().__init__()
        self.rank, self.peer, self.tensor, self.sends = rank, peer, tensor.data, sends
        self.is_over = False
        self.error = ""
        self.content: Tensor | None = None
        self._turns = turns

    def is_completed(self) -> bool:
        return self.is_over

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._turns.wait(self.is_completed, self._turns.now + TIMEOUT)
        if not self.is_over or self.error:
            raise RuntimeError(f"{self.error or LATE}: rank {self.peer}")
        if self.content is not None:
            self.tensor.copy_(self.content)
            self.content = None
        return True


class Network:
    """Messages that begin when both ends are first in their queues."""

    def __init__(self, turns: Turns, queue_of: Callable[[int, bool], Hashable]) -> None:
        self.met: list[tuple[End, End]] = []
        """The sends and receives of messages that can be over any time."""
        self._turns, self._queue_of = turns, queue_of
        self._queues: dict[tuple[int, Hashable], deque[End]] = defaultdict(deque)

    def post(self, end: End) -> End:
        self._turns.wait()
        if self._turns.closed & {end.peer, end.rank}:
            end.is_over, end.error = True, CLOSED
            return end
        queue = self._queue(end)
        queue.append(end)
        if len(queue) == 1:
            self._begin(end)
        return end

    def _queue(self, end: End) -> deque[End]:
        return self._queues[end.rank, self._queue_of(end.peer, end.sends)]

    def _begin(self, end: End) -> None:
        """Begin the message of an end that is now first in its queue, if the other one is, too."""
        others = self._queues[end.peer, self._queue_of(end.rank, not end.sends)]
        if others and others[0].peer == end.rank and others[0].sends is not end.sends:
            self.met.append((end, others[0]) if end.sends else (others[0], end))

    def end(self, number: int) -> None:
        send, receive = self.met.pop(number)
        assert send.tensor.shape == receive.tensor.shape, "a wrong message"
        receive.content = send.tensor.clone()
        self._finish([send, receive])

    def _finish(self, ends: list[End], error: str = "") -> None:
        """End these, and begin what is behind them."""
        behind: list[deque[End]] = []
        for end in ends:
            end.is_over, end.error = True, error
            queue = self._queue(end)
            if queue[0] is end:
                behind.append(queue)
            queue.remove(end)
        for queue in behind:
            if queue and not any(queue[0] in pair for pair in self.met):
                self._begin(queue[0])

    def count_pending(self) -> int:
        return sum(map(len, self._queues.values()))

    def close(self, rank: int) -> None:
        self.met = [pair for pair in self.met if rank not in (pair[0].rank, pair[0].peer)]
        self._finish([end for queue in self._queues.values() for end in queue if rank in (end.rank, end.peer)], CLOSED)


class Collective(dist.Work):
    def __init__(self, group: Group, given: dict[int, Any], take: Callable[[list[Any]], None]) -> None:
        super().__init__()
        self._group, self._given, self._take = group, given, take

    def wait(self, timeout: timedelta | None = None) -> bool:
        turns = self._group.turns

        def is_ready() -> bool:
            return len(self._given) == turns.ranks or bool(turns.closed)

        turns.wait(is_ready, turns.now + TIMEOUT)
        if len(self._given) < turns.ranks:
            raise RuntimeError(CLOSED if turns.closed else LATE)
        self._take([self._given[rank] for rank in range(turns.ranks)])
        return True


class Group(dist.ProcessGroup):
    group_name = "turns"  # type: ignore[assignment]

    def __init__(self, turns: Turns, rank: int) -> None:
        super().__init__(rank, turns.ranks)  # type: ignore[call-arg]
        self.turns, self._rank, self._count = turns, rank, 0
        self._backend = SimpleNamespace(options=SimpleNamespace(_timeout=timedelta(seconds=TIMEOUT)))

    def _get_backend(self, device: torch.device) -> Any:
        return self._backend

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> End:
        return self.turns.network.post(End(self.turns, self._rank, peer, tensors[0], True))

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> End:
        spoil(tensors[0])
        return self.turns.network.post(End(self.turns, self._rank, peer, tensors[0], False))

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any = None) -> Collective:
        return self._collect(inputs[0].clone(), lambda found: [a.copy_(b) for a, b in zip(outputs[0], found)])  # noqa: B905

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Collective:
        def take(found: list[Tensor]) -> None:
            stacked = torch.stack(found)
            operation = getattr(options, "reduceOp", dist.ReduceOp.SUM)
            reduced = {dist.ReduceOp.MIN: stacked.amin, dist.ReduceOp.MAX: stacked.amax}.get(operation, stacked.sum)(0)
            tensors[0].copy_(reduced)

        return self._collect(tensors[0].clone(), take)

    def broadcast(self, tensors: list[Tensor], options: Any) -> Collective:
        return self._collect(tensors[0].clone(), lambda found: tensors[0].copy_(found[options.rootRank]))

    def barrier(self, opts: Any = None) -> Collective:
        return self._collect(None, lambda found: None)

    def _collect(self, given: Any, take: Callable[[list[Any]], object]) -> Collective:
        self.turns.wait()
        self._count += 1
        of_all = self.turns.store.collectives[self._count]
        of_all[self._rank] = given
        self.turns.has_changed = True
        return Collective(self, of_all, take)  # type: ignore[arg-type]


class Store:
    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._values: dict[str, bytes] = {}
        self.collectives: dict[int, dict[int, Any]] = defaultdict(dict)
        self.is_gone = False

    def _begin(self) -> None:
        self._turns.wait()
        self._turns.has_changed = True
        if self.is_gone:
            raise dist.DistNetworkError("Broken pipe")

    def clone(self) -> Store:
        return self

    def has_extended_api(self) -> bool:
        return True

    def set(self, key: str, value: str | bytes) -> None:
        self._begin()
        self._values[key] = value.encode() if isinstance(value, str) else value

    def get(self, key: str) -> bytes:
        self.wait([key], timedelta(seconds=TIMEOUT))
        return self._values[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def check(self, keys: list[str]) -> bool:
        self._begin()
        return all(key in self._values for key in keys)

    def add(self, key: str, amount: int) -> int:
        self._begin()
        self._values[key] = str(int(self._values.get(key, b"0")) + amount).encode()
        return int(self._values[key])

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self._begin()
        if self._values.get(key, b"") == expected.encode():
            self._values[key] = desired.encode()
        return self._values.get(key, expected.encode())

    def delete_key(self, key: str) -> bool:
        self._begin()
        return self._values.pop(key, None) is not None

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        self._begin()

        def is_ready() -> bool:
            return self.is_gone or all(key in self._values for key in keys)

        self._turns.wait(is_ready, self._turns.now + timeout.total_seconds())
        if self.is_gone:
            raise dist.DistNetworkError("Broken pipe")
        if not is_ready():
            raise dist.DistStoreError("wait timeout")


class TokenStage(PipelineStage):
    """A stage that computes nothing. It checks that what it receives is what the stage before or after it made."""

    def __init__(self, turns: Turns, index: int, num_stages: int) -> None:
        super().__init__(nn.Linear(1, 1), index, num_stages, torch.device("cpu"))
        self._turns = turns
        self.weights_of: list[int] = []
        """Microbatches whose weight gradients were computed."""
        self.fails_in: Collection[tuple[str, int]] = ()
        """Kinds and microbatches of ops that fail."""

    def _begin(self, kind: str, microbatch: int, given: Tensor | None, maker: int) -> None:
        self._turns.wait()
        if (kind, microbatch) in self.fails_in:
            raise ArithmeticError("too much")
        if given is not None:
            expected = _number(maker, microbatch)
            assert given.item() == expected, f"{self.stage_index}{kind}{microbatch} got {given.item()}, not {expected}"

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: Any = None, save_forward_output: bool = True
    ) -> Any:
        inputs = args if self.is_first else self._retrieve_recv_activations(fwd_chunk_id)
        given = None if self.is_first else inputs[0]
        self._begin("F", fwd_chunk_id, given, self.stage_index - 1)
        output = _token(self.stage_index, fwd_chunk_id)
        self.fwd_cache[fwd_chunk_id] = (output,), list(inputs)
        if self.is_last and save_forward_output:
            self.output_chunks.append(output)
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        if not self.has_backward:
            return
        self.fwd_cache.pop(bwd_chunk_id)
        given = None if self.is_last else self._retrieve_recv_grads(bwd_chunk_id)[0]
        self._begin("B" if full_backward else "I", bwd_chunk_id, given, self.stage_index + 1)
        self.bwd_cache[bwd_chunk_id] = (None if self.is_first else _token(self.stage_index, bwd_chunk_id),)
        if full_backward:
            self.weights_of.append(bwd_chunk_id)
        else:
            self.dw_runner[bwd_chunk_id] = lambda: None

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        if not self.has_backward:
            return
        self.dw_runner.pop(bwd_chunk_id)
        self._begin("W", bwd_chunk_id, None, 0)
        self.weights_of.append(bwd_chunk_id)


def _number(stage: int, microbatch: int) -> float:
    return 1.0 + 1000 * stage + microbatch


def _token(stage: int, microbatch: int) -> Tensor:
    return torch.full((1, 1), _number(stage, microbatch))
