"""Annealing where a message holds up both of its ranks, as on GPUs whose streams share the hardware's queues.

As in `kernel`, on plain numbers, and as machine code where numba is installed. A message starts when both ranks are
free, which depends on all that runs at that time. So each move is timed by a whole run, with the rules of
`zbpipe.simulator.rendezvous`; a test compares the times.
"""

from __future__ import annotations

import math

from zbpipe.planner.kernel import NEVER, NONE, Ints, Job, Lists, fold, link, pick_move, undo

FREE, COMPUTES, SENDS, RECEIVES = 0, 1, 2, 3
"""What a rank does."""


def anneal_by_rendezvous(job: Job, start: Ints, heat: float, work: int, seed: int) -> tuple[float, list[int], int]:
    """Move ops of the critical path back and forth on their rank, and keep what is not longer, or not much.

    Args:
        job: what to schedule. Its `lag` is the time that a message holds up both ranks.
        start: a sound order within the limits.
        heat: seconds that one move may lose at the start; it falls to zero.
        work: how many ops to time before it ends; with none it only times the start.
        seed: of the random numbers, 1 to 2147483646.

    Returns:
        The makespan of the best order, that order, and how much of the work was done.
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


def run(job: Job, lists: Lists, causes: list[int], allowed: float) -> tuple[float, int]:
    """The makespan and the op that ends last; `NEVER` as soon as it is sure to be more than `allowed`.

    `causes` gets by op the one whose end it waited for, on its own rank or behind messages; -1 for none.
    """
    microbatches, seconds = job.microbatches, lists.seconds
    state, until, sending = [FREE] * job.ranks, [0.0] * job.ranks, [-1] * job.ranks
    cause, following, held = [-1] * job.ranks, list(lists.first), [False] * job.ranks
    left = [0.0] * job.ranks
    arrived = [False] * len(seconds)
    sent = [0 for _ in range(0)]
    for op in range(len(seconds)):
        if not lists.gone[op]:
            left[job.rank[op // microbatches]] += seconds[op]
    now, length, last = 0.0, 0.0, -1
    while True:
        begin_messages(job, now, state, until, sending, cause, held, sent)
        wake = NEVER
        for rank in range(job.ranks):
            op = following[rank]
            if state[rank] == FREE and not held[rank] and op >= 0:
                node = op // microbatches
                if node % 3 == 2 or job.feeder[node] < 0 or arrived[op]:
                    if now + left[rank] > allowed:
                        return NEVER, -1
                    state[rank], until[rank] = COMPUTES, now + seconds[op]
                    left[rank] -= seconds[op]
                    causes[op], cause[rank] = cause[rank], op
            if state[rank] != FREE:
                wake = min(wake, until[rank])
        if wake >= NEVER:
            break
        now = wake
        for rank in range(job.ranks):
            if state[rank] == FREE or until[rank] > now:
                continue
            was, state[rank] = state[rank], FREE
            if was == COMPUTES:
                op = following[rank]
                following[rank] = lists.after[op]
                if now >= length:
                    length, last = now, op
                user = job.fed[op // microbatches]
                if user >= 0 and job.rank[user] == rank:
                    arrived[user * microbatches + op % microbatches] = True
                elif user >= 0:
                    sending[rank] = op
                    sent.append(rank)
            elif was == SENDS:
                op = sending[rank]
                arrived[job.fed[op // microbatches] * microbatches + op % microbatches] = True
    return length, last


def begin_messages(
    job: Job,
    now: float,
    state: list[int],
    until: list[float],
    sending: Ints,
    cause: list[int],
    held: list[bool],
    sent: list[int],
) -> None:
    """Begin those of the `sent` messages, by sender, that can begin; mark the ranks that wait for others as `held`."""
    for rank in range(job.ranks):
        held[rank] = False
    kept = 0
    for sender in sent:
        user = job.fed[sending[sender] // job.microbatches]
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


def follow(causes: Ints, last: int, path: list[int]) -> None:
    """Fill `path` with ops that each wait for the next in it, from `last` on."""
    path.clear()
    op = last
    while op >= 0:
        path.append(op)
        op = causes[op]
