"""Annealing where a message blocks both of its ranks, as on GPUs whose streams share the hardware's queues.

As in `kernel`, on plain numbers, and as machine code where numba is installed. A message starts when both ranks are
free, which depends on all that runs at that time. So each move is timed by a whole run, with the rules of
`zbpipe.simulator.rendezvous`. A test compares the times.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from zbpipe.planner.kernel import NEVER, NONE, Ints, Job, Lists, fill, fold, link, pick_move, undo

FREE, COMPUTES, SENDS, RECEIVES = 0, 1, 2, 3
"""States of a rank."""


def anneal_by_rendezvous(job: Job, start: Ints, heat: float, work: int, seed: int) -> tuple[float, Ints, int]:
    """Move ops of the critical path back and forth on their rank. Keep orders that are not longer, or not by much.

    Args:
        job: the scheduling problem. Its `lag` is the time that a message blocks both ranks.
        start: a sound order within the limits.
        heat: seconds that one move may lose at the start; it falls to zero.
        work: number of ops to time before it ends. With none it only times the start.
        seed: seed of the random numbers, 1 to 2147483646.

    Returns:
        The makespan of the best order, that order, and the amount of work done.
    """
    total = len(start)
    lists = link(job, start)
    causes, trial, path = fill(total, -1), fill(total, -1), fill(total, 0)
    length, last = run(job, lists, causes, NEVER)
    steps = follow(causes, last, path)
    best, best_codes = length, start.copy()
    done = total
    while done < work:
        move, seed = pick_move(job, lists, path, steps, seed)
        done += 1
        if move.kind == NONE:
            continue
        seed = seed * 48271 % 2147483647
        allowed = length - heat * (1.0 - done / work) * math.log(seed / 2147483647.0)
        found, last = run(job, lists, trial, allowed)
        done += total
        if found > allowed:
            undo(job, lists, move)
            continue
        length = found
        causes, trial = trial, causes
        steps = follow(causes, last, path)
        if length < best * (1 - 1e-9):
            best, best_codes = length, fold(job, lists)
    return best, best_codes, done


class Rank:
    """State of a rank in a run."""

    state: int = FREE
    """`FREE`, `COMPUTES`, `SENDS` or `RECEIVES`."""
    following: int = 0
    """The op that runs, or the next one; -1 for none."""
    cause: int = 0
    """The op whose end the next one waits for."""
    sending: int = 0
    """The op whose result it has last sent, or is to send."""
    held: int = 0
    """1 while it waits for a message that has not begun."""
    until: float = 0.0
    """End of its state."""
    left: float = 0.0
    """Seconds of the ops that have not begun."""


def blank_ranks(count: int) -> list[Rank]:
    """Ranks at the time 0."""
    return [Rank() for _ in range(count)]


class Run(NamedTuple):
    """State of a run."""

    ranks: list[Rank]
    sent: Ints
    """Senders of messages that have not begun, in the order in which the messages were made. -1 ends them."""
    arrived: list[bool]
    """Whether its rank has the result that an op takes, by op."""


def run(job: Job, lists: Lists, causes: list[int], allowed: float) -> tuple[float, int]:
    """The makespan and the op that ends last. `NEVER` as soon as the makespan is sure to exceed `allowed`.

    `causes` gets, by op, the op whose end it waited for, on its own rank or through messages; -1 for none.
    """
    state = begin(job, lists)
    now, length, last = 0.0, 0.0, -1
    while True:
        begin_messages(job, state, now)
        if not begin_computations(job, lists, state, causes, now, allowed):
            return NEVER, -1
        wake = NEVER
        for rank in range(job.ranks):
            if state.ranks[rank].state != FREE:
                wake = min(wake, state.ranks[rank].until)
        if wake >= NEVER:
            return length, last
        now = wake
        for rank in range(job.ranks):
            each = state.ranks[rank]
            if each.state == FREE or each.until > now:
                continue
            if each.state == COMPUTES:
                length, last = now, each.following
            end(job, lists, state, rank)


def begin(job: Job, lists: Lists) -> Run:
    """All ranks at the start of a step."""
    ranks = blank_ranks(job.ranks)
    for rank in range(job.ranks):
        ranks[rank].following, ranks[rank].cause, ranks[rank].sending = lists.first[rank], -1, -1
    for op in range(len(lists.ops)):
        if not lists.ops[op].gone:
            ranks[job.nodes[op // job.microbatches].rank].left += lists.ops[op].seconds
    return Run(ranks, fill(job.ranks + 1, -1), fill(len(lists.ops), False))


def begin_messages(job: Job, run: Run, now: float) -> None:
    """Begin the messages that can begin. Mark the ranks that wait for others as held."""
    ranks, sent = run.ranks, run.sent
    for rank in range(job.ranks):
        ranks[rank].held = 0
    kept = each = 0
    while sent[each] >= 0:
        sender = ranks[sent[each]]
        user = job.nodes[job.nodes[sender.sending // job.microbatches].fed]
        receiver = ranks[user.rank]
        if sender.state or receiver.state or sender.held or receiver.held:
            sender.held = receiver.held = 1
            sent[kept] = sent[each]
            kept += 1
        else:
            # Both waited for the one that was free later.
            sender.cause = receiver.cause = receiver.cause if receiver.until > sender.until else sender.cause
            sender.until = receiver.until = now + user.lag
            sender.state, receiver.state = SENDS, RECEIVES
        each += 1
    for gone in range(kept, each):
        sent[gone] = -1


def begin_computations(job: Job, lists: Lists, run: Run, causes: Ints, now: float, allowed: float) -> bool:
    """Begin the computations that can begin. False if a rank has too much work left to end by `allowed`."""
    for number in range(job.ranks):
        rank = run.ranks[number]
        op = rank.following
        if rank.state != FREE or rank.held or op < 0:
            continue
        if job.nodes[op // job.microbatches].feeder >= 0 and not run.arrived[op]:
            continue
        if now + rank.left > allowed:
            return False
        seconds = lists.ops[op].seconds
        rank.state, rank.until = COMPUTES, now + seconds
        rank.left -= seconds
        causes[op], rank.cause = rank.cause, op
    return True


def end(job: Job, lists: Lists, run: Run, number: int) -> None:
    """End the rank's op or message, and pass on its result."""
    microbatches, rank = job.microbatches, run.ranks[number]
    was, rank.state = rank.state, FREE
    if was == SENDS:
        op = rank.sending
        run.arrived[job.nodes[op // microbatches].fed * microbatches + op % microbatches] = True
    elif was == COMPUTES:
        op = rank.following
        rank.following = lists.ops[op].after
        node = op // microbatches
        if node % 3 == 1:
            run.arrived[op + microbatches] = True
        user = job.nodes[node].fed
        if user >= 0 and job.nodes[user].rank == number:
            run.arrived[user * microbatches + op % microbatches] = True
        elif user >= 0:
            rank.sending = op
            last = 0
            while run.sent[last] >= 0:
                last += 1
            run.sent[last] = number


def follow(causes: Ints, last: int, path: Ints) -> int:
    """Write ops that each wait for the next to `path`, from `last` on. Returns their number."""
    steps, op = 0, last
    while op >= 0:
        path[steps] = op
        steps += 1
        op = causes[op]
    return steps
