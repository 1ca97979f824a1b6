"""Annealing where a message blocks both of its ranks, as on GPUs whose streams share the hardware's queues.

As in `kernel`, on plain numbers, and as machine code where numba is installed. A message starts when both ranks are
free, which depends on all that runs at that time. So each move is timed by a whole run, with the rules of
`zbpipe.simulator.rendezvous`. A test compares the times.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from zbpipe.planner.kernel import NEVER, NONE, Ints, Job, Lists, fold, link, pick_move, undo

FREE, COMPUTES, SENDS, RECEIVES = 0, 1, 2, 3
"""States of a rank."""


def anneal_by_rendezvous(job: Job, start: Ints, heat: float, work: int, seed: int) -> tuple[float, list[int], int]:
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
    merges = min(job.full) < NEVER
    lists = link(job, start)
    causes, trial = [-1] * total, [-1] * total
    length, last = run(job, lists, causes, NEVER)
    path = [0 for _ in range(0)]
    follow(causes, last, path)
    best, best_order, best_gone = length, list(lists.order), list(lists.gone)
    done = total
    while done < work:
        move, seed = pick_move(job, lists, path, merges, seed)
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
        follow(causes, last, path)
        if length < best * (1 - 1e-9):
            best = length
            for position in range(total):
                best_order[position] = lists.order[position]
                best_gone[position] = lists.gone[position]
    return best, fold(job, best_order, best_gone), done


class Ranks(NamedTuple):
    """State of a run, by rank unless stated otherwise."""

    state: list[int]
    """`FREE`, `COMPUTES`, `SENDS` or `RECEIVES`."""
    until: list[float]
    """End of that state."""
    following: list[int]
    """The op that runs, or the next one; -1 for none."""
    left: list[float]
    """Seconds of the ops that have not begun."""
    cause: list[int]
    """The op whose end the next one waits for."""
    sending: list[int]
    """The op whose result it has last sent, or is to send."""
    held: list[bool]
    """Whether it waits for a message that has not begun."""
    sent: list[int]
    """Senders of such messages, in the order in which the messages were made."""
    arrived: list[bool]
    """Whether its rank has the result that an op takes, by op."""


def run(job: Job, lists: Lists, causes: list[int], allowed: float) -> tuple[float, int]:
    """The makespan and the op that ends last. `NEVER` as soon as the makespan is sure to exceed `allowed`.

    `causes` gets, by op, the op whose end it waited for, on its own rank or through messages; -1 for none.
    """
    ranks = begin(job, lists)
    state, until = ranks.state, ranks.until
    now, length, last = 0.0, 0.0, -1
    while True:
        begin_messages(job, ranks, now)
        if not begin_computations(job, lists, ranks, causes, now, allowed):
            return NEVER, -1
        wake = NEVER
        for rank in range(job.ranks):
            if state[rank] != FREE:
                wake = min(wake, until[rank])
        if wake >= NEVER:
            return length, last
        now = wake
        for rank in range(job.ranks):
            if state[rank] == FREE or until[rank] > now:
                continue
            if state[rank] == COMPUTES:
                length, last = now, ranks.following[rank]
            end(job, lists, ranks, rank)


def begin(job: Job, lists: Lists) -> Ranks:
    """All ranks at the start of a step."""
    left = [0.0] * job.ranks
    for op in range(len(lists.seconds)):
        if not lists.gone[op]:
            left[job.rank[op // job.microbatches]] += lists.seconds[op]
    nothing = [-1] * job.ranks
    return Ranks(
        [FREE] * job.ranks,
        [0.0] * job.ranks,
        list(lists.first),
        left,
        list(nothing),
        list(nothing),
        [False] * job.ranks,
        [0 for _ in range(0)],
        [False] * len(lists.seconds),
    )


def begin_messages(job: Job, ranks: Ranks, now: float) -> None:
    """Begin the messages that can begin. Mark the ranks that wait for others as held."""
    state, until, cause, held, sent = ranks.state, ranks.until, ranks.cause, ranks.held, ranks.sent
    for rank in range(job.ranks):
        held[rank] = False
    kept = 0
    for sender in sent:
        user = job.fed[ranks.sending[sender] // job.microbatches]
        receiver = job.rank[user]
        if state[sender] or state[receiver] or held[sender] or held[receiver]:
            held[sender] = held[receiver] = True
            sent[kept] = sender
            kept += 1
            continue
        # Both waited for the one that was free later.
        latest = receiver if until[receiver] > until[sender] else sender
        cause[sender] = cause[receiver] = cause[latest]
        until[sender] = until[receiver] = now + job.lag[user]
        state[sender], state[receiver] = SENDS, RECEIVES
    while len(sent) > kept:
        sent.pop()


def begin_computations(job: Job, lists: Lists, ranks: Ranks, causes: list[int], now: float, allowed: float) -> bool:
    """Begin the computations that can begin. False if a rank has too much work left to end by `allowed`."""
    for rank in range(job.ranks):
        op = ranks.following[rank]
        if ranks.state[rank] != FREE or ranks.held[rank] or op < 0:
            continue
        if job.feeder[op // job.microbatches] >= 0 and not ranks.arrived[op]:
            continue
        if now + ranks.left[rank] > allowed:
            return False
        ranks.state[rank], ranks.until[rank] = COMPUTES, now + lists.seconds[op]
        ranks.left[rank] -= lists.seconds[op]
        causes[op], ranks.cause[rank] = ranks.cause[rank], op
    return True


def end(job: Job, lists: Lists, ranks: Ranks, rank: int) -> None:
    """End the rank's op or message, and pass on its result."""
    microbatches = job.microbatches
    was, ranks.state[rank] = ranks.state[rank], FREE
    if was == SENDS:
        op = ranks.sending[rank]
        ranks.arrived[job.fed[op // microbatches] * microbatches + op % microbatches] = True
    elif was == COMPUTES:
        op = ranks.following[rank]
        ranks.following[rank] = lists.after[op]
        node = op // microbatches
        if node % 3 == 1:
            ranks.arrived[op + microbatches] = True
        user = job.fed[node]
        if user >= 0 and job.rank[user] == rank:
            ranks.arrived[user * microbatches + op % microbatches] = True
        elif user >= 0:
            ranks.sending[rank] = op
            ranks.sent.append(rank)


def follow(causes: Ints, last: int, path: list[int]) -> None:
    """Fill `path` with ops that each wait for the next in it, from `last` on."""
    path.clear()
    op = last
    while op >= 0:
        path.append(op)
        op = causes[op]
