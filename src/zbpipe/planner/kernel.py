"""The inner loops of the search, on plain numbers: list scheduling, justifying, and annealing of an order of ops.

These functions run in Python, and as machine code where numba is installed (`zbpipe.planner.engine`), with the same
results. So they use only types that numba can compile: flat sequences, loops, no objects but the `Job`. So some
functions are long and have many arguments: lists replace objects, and calls in the innermost loop cost time. `feeder`
and `fed` repeat an op's dependencies in numbers. Tests compare the times with `zbpipe.simulate`.

A *node* is 3 * stage + kind, kind being 0 for F, 1 for I and 2 for W. Number node * microbatches + microbatch stands
for one op. An order of all ops is *sound* if no op comes before its dependencies. Then the ranks, which run their ops
in that order, cannot wait for each other in a cycle.

A full backward B is an I that includes its W. In an order the number of all ops is added to the numbers of both. The
place of that W has no meaning.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

Floats = Sequence[float]
Ints = Sequence[int]

NEVER = 1e300
"""A time later than all others."""
GONE = -1.0
"""Arrival time of a W that is part of a B."""


class Job(NamedTuple):
    """The scheduling problem, with one number for each node unless stated otherwise."""

    ranks: int
    microbatches: int
    rank: Ints
    """Rank of the node."""
    feeder: Ints
    """Node whose result it takes, -1 for the first stage's F."""
    after: Ints
    """Another node on its own rank that has to come first, -1 for none."""
    lag: Floats
    """Seconds until this result arrives."""
    fed: Ints
    """Node of another stage that takes its result, or the last stage's I for its F; -1 for none."""
    seconds: Floats
    whole: Floats
    """Seconds of a full backward in place of an I; unused for other nodes."""
    takes: Floats
    """Memory that it adds to its rank, from then on: positive for F, negative for W, either sign for I."""
    needs: Floats
    """Memory that has to be free on its rank for it to run: what it takes, and its working memory."""
    full: Floats
    """Memory needed by a full backward in place of an I; `NEVER` for other nodes, and where it would save nothing."""
    reserve: Floats
    """Memory that list scheduling leaves free after it, so that the microbatch can continue."""
    ahead: Floats
    """Like `reserve`, for an F while no I of its microbatch is over and only F take memory there; else `NEVER`."""
    limit: Floats
    """Memory limit of each rank."""
    origin: Floats
    """Start of each rank's step. The *length* of an order is the longest time from there to the end of a rank; with
    zeros it is the makespan."""


def list_schedule(
    job: Job,
    urgency: Floats,
    period: float,
    patience: float,
    release: float,
    margin: Floats,
    cutoff: float,
    first: bool = False,
) -> tuple[float, list[int]]:
    """List scheduling: a clock runs, and each free rank starts the most urgent op that is ready and fits into memory.

    Args:
        job: the scheduling problem.
        urgency: urgency of each node for microbatch 0; the least is the most urgent. Microbatch m has m * `period`
            more.
        period: seconds between microbatches in `urgency`.
        patience: seconds that a rank waits for an op more urgent than those that are ready.
        release: seconds between the microbatches that may enter the first stage.
        margin: memory to keep free after an I of each node while there are F to come; otherwise B runs in its place.
        cutoff: give up as soon as the length is sure to reach this.
        first: whether ranks have endless patience for each I of the first microbatch. All other I follow it, so an F
            that delays it on one rank delays all ranks before.

    Returns:
        The length, and the ops in the order of their starts. Infinity if it gave up or cannot continue.
    """
    nodes, microbatches = len(job.rank), job.microbatches
    mine, left, forwards, work = loads(job)
    free = list(job.limit)
    apart, room = rooms(job)
    busy, wake = list(job.origin), list(job.origin)
    ran, sent = [0] * nodes, [0] * nodes
    arrival = [release * op if op < microbatches else 0.0 for op in range(nodes * microbatches)]
    sent[0] = microbatches
    order, length = [0 for _ in range(0)], 0.0
    while True:
        rank, now = earliest(wake)
        if now >= NEVER:
            break
        chosen, start, wake[rank] = choose(
            job, mine[rank], now, free[rank], room, urgency, period, patience, ran, sent, arrival, first
        )
        if chosen < 0:
            continue
        if start > now:
            wake[rank] = start
            continue
        if now + work[rank] - job.origin[rank] >= cutoff:
            return NEVER, order
        op = chosen * microbatches + ran[chosen]
        end = now + job.seconds[chosen]
        full = job.full[chosen] < NEVER and apart[chosen] + (margin[chosen] if forwards[rank] else 0.0) > free[rank]
        if full:
            arrival[op + microbatches] = GONE
            order.append(op + len(arrival))
            op += microbatches
            end = now + job.whole[chosen]
            free[rank] -= job.takes[chosen + 1]
            left[rank] -= 1
        order.append(op + len(arrival) if full else op)
        length = max(length, end - job.origin[rank])
        busy[rank] = end
        work[rank] -= end - now
        free[rank] -= job.takes[chosen]
        left[rank] -= 1
        forwards[rank] -= 1 if chosen % 3 == 0 else 0
        wake[rank] = end if left[rank] else NEVER
        users = [job.fed[chosen], chosen + 1] if chosen % 3 == 1 else [job.fed[chosen]]
        for user in users:
            at = user * microbatches + ran[chosen]
            if user >= 0:
                sent[user] += 1
            if user >= 0 and arrival[at] != GONE:
                arrival[at] = end + job.lag[user]
                receiver = job.rank[user]
                wake[receiver] = min(wake[receiver], max(arrival[at] - patience, busy[receiver]))
        ran[chosen] += 1
        if job.full[chosen - chosen % 3 + 1] < NEVER:
            skip_gone(job, chosen - chosen % 3 + 2, ran, arrival)
    return (length if len(order) == nodes * microbatches else NEVER), order


def loads(job: Job) -> tuple[list[list[int]], list[int], list[int], list[float]]:
    """Nodes of each rank, its number of ops, how many of them are F, and the seconds that all take."""
    mine = [[0 for _ in range(0)] for _ in range(job.ranks)]
    left, forwards = [0] * job.ranks, [0] * job.ranks
    work = [0.0] * job.ranks
    for node in range(len(job.rank)):
        rank = job.rank[node]
        mine[rank].append(node)
        left[rank] += job.microbatches
        forwards[rank] += job.microbatches if node % 3 == 0 else 0
        # The least that it can take: backwards may all be full ones.
        merged = node % 3 == 1 and job.full[node] < NEVER
        saved = job.seconds[node] + job.seconds[node + 1] - job.whole[node] if merged else 0.0
        work[rank] += job.microbatches * (job.seconds[node] - saved)
    return mine, left, forwards, work


def earliest(times: Floats) -> tuple[int, float]:
    """Index of the first minimum, and the minimum."""
    least = 0
    for each in range(1, len(times)):
        if times[each] < times[least]:
            least = each
    return least, times[least]


def rooms(job: Job) -> tuple[list[float], list[float]]:
    """Memory that list scheduling needs free to start each node, with I apart from its W; and the same with B."""
    apart = [max(job.needs[node], job.takes[node] + job.reserve[node]) for node in range(len(job.rank))]
    return apart, [min(apart[node], job.full[node]) for node in range(len(job.rank))]


def skip_gone(job: Job, node: int, ran: list[int], arrival: Floats) -> None:
    """Count the next W of this node as run, if they were part of a B."""
    while ran[node] < job.microbatches and arrival[node * job.microbatches + ran[node]] == GONE:
        ran[node] += 1


def choose(
    job: Job,
    nodes: Ints,
    now: float,
    free: float,
    room: Floats,
    urgency: Floats,
    period: float,
    patience: float,
    ran: Ints,
    sent: Ints,
    arrival: Floats,
    first: bool,
) -> tuple[int, float, float]:
    """The most urgent of a rank's `nodes` (-1: none), the arrival of its input, and when to look again for others."""
    chosen, least, start, wake = -1, NEVER, 0.0, NEVER
    reserve = left_free(job, nodes, ran)
    for node in nodes:
        microbatch = ran[node]
        if microbatch >= sent[node]:
            continue
        # An F may take the last room if another microbatch needs none to continue.
        if room[node] > free and (node % 3 or max(job.needs[node], job.takes[node] + reserve) > free):
            continue
        arrived = arrival[node * job.microbatches + microbatch]
        urgent = urgency[node] + period * microbatch
        wait = NEVER if first and microbatch == 0 and node % 3 == 1 else patience
        if arrived - wait > now:
            wake = min(wake, arrived - wait)
        elif urgent < least:
            chosen, least, start = node, urgent, arrived
    return chosen, start, wake


def left_free(job: Job, nodes: Ints, ran: Ints) -> float:
    """Memory to keep free on a rank so that one of its microbatches can continue, which then frees memory.

    The rank holds all that it has run of them, because no I of them is over. The one on the latest stage needs the
    least.
    """
    least = NEVER
    for node in nodes:
        if node % 3 == 0 and ran[node] > ran[node + 1]:
            least = min(least, job.ahead[node])
    return least


class Lists(NamedTuple):
    """Mutable form of an order for annealing. Lists are by op unless stated otherwise."""

    order: list[int]
    """Ops by position."""
    place: list[int]
    """Position of each op."""
    gone: list[int]
    """1 for a W that is part of a B. It keeps a place in the order, which has no meaning."""
    seconds: list[float]
    takes: list[float]
    needs: list[float]
    before: list[int]
    """Previous op on its rank, -1 for none."""
    after: list[int]
    held: list[float]
    """Memory of its rank from its start on."""
    first: list[int]
    """First op of each rank."""
    last: list[int]


class Move(NamedTuple):
    """A change of the order, with the data to undo it and the range whose times it may change."""

    kind: int
    """`NONE`, `SHIFTED`, `MERGED` or `PARTED`."""
    op: int
    """The moved op, or the I that was merged with its W or separated from it."""
    anchor: int
    """The op after which it, or the W, was on its rank; -1 for none."""
    position: int
    """Its previous position in the order."""
    left: int
    """First position that changed."""
    right: int
    """Last position that changed."""
    early: int
    """First position from which on the time to the end of all may change."""
    late: int
    """Last position that surely has to be timed again."""


NONE, SHIFTED, MERGED, PARTED = 0, 1, 2, 3


def anneal(job: Job, start: Ints, target: float, heat: float, work: int, seed: int) -> tuple[float, list[int], int]:
    """Move ops of the critical path back and forth on their rank. Keep orders that are not longer, or not by much.

    Where a full backward saves memory, it also merges an I and its W, and separates them again.

    Args:
        job: the scheduling problem.
        start: a sound order within the limits.
        target: seconds at which it stops.
        heat: seconds that one move may lose at the start; it falls to zero.
        work: number of ops to time before it ends.
        seed: seed of the random numbers, 1 to 2147483646.

    Returns:
        The length of the best order, that order, and the amount of work done.
    """
    total = len(start)
    merges = min(job.full) < NEVER
    lists = link(job, start)
    order, gone = lists.order, lists.gone
    end, backup, tail = [0.0] * total, [0.0] * total, [0.0] * total
    lag = [job.lag[op // job.microbatches] for op in range(total)]
    path = [0 for _ in range(0)]
    replay(job, lists, end, backup, tail, 0, total - 1, total - 1, NEVER)
    look_ahead(job, lists, tail, 0, total - 1)
    length = measure(job, lists.last, end)
    critical_ops(job, lists, end, lag, path)
    best, best_order, best_gone = length, list(order), list(gone)
    done = 0
    while done < work and best > target:
        done += 10
        move, seed = pick_move(job, lists, path, merges, seed)
        if move.kind == NONE:
            continue
        seed = seed * 48271 % 2147483647
        allowed = length - heat * (1.0 - done / work) * math.log(seed / 2147483647.0)
        until, good = replay(job, lists, end, backup, tail, move.left, move.right, move.late, allowed)
        done += until - move.left
        if good and measure(job, lists.last, end) <= allowed:
            length = measure(job, lists.last, end)
            critical_ops(job, lists, end, lag, path)
            done += len(path) + look_ahead(job, lists, tail, move.early, move.right)
            if length < best * (1 - 1e-9):
                best = length
                for position in range(total):
                    best_order[position] = order[position]
                    best_gone[position] = gone[position]
        else:
            for position in range(move.left, until):
                end[order[position]] = backup[position]
            undo(job, lists, move)
    return best, fold(job, best_order, best_gone), done


def pick_move(job: Job, lists: Lists, path: Ints, merges: bool, seed: int) -> tuple[Move, int]:
    """Move an op of `path`, or merge or split it where B `merges` I and W. Returns also the next seed."""
    seed = seed * 48271 % 2147483647
    op = path[seed % len(path)]
    seed = seed * 48271 % 2147483647
    share = seed / 2147483647.0
    jump = 1 + int(30 * share * share * share)  # mostly near; chosen by hand, not tuned
    seed = seed * 48271 % 2147483647
    if merges and seed // 2 % 4 == 0:
        return flip(job, lists, op), seed
    move = go(job, lists, op, seed % 2 == 0, jump)
    if move.kind == NONE and merges:
        move = make_room(job, lists, op, jump)
    return move, seed


def unfold(job: Job, codes: Ints) -> tuple[list[int], list[int], list[float], list[float], list[float]]:
    """Ops of an order, and by op: 1 for a W that is part of a B, seconds, memory taken, and memory needed."""
    total, microbatches = len(codes), job.microbatches
    order, gone = list(codes), [0] * total
    seconds, takes, needs = [0.0] * total, [0.0] * total, [0.0] * total
    for node in range(len(job.rank)):
        for op in range(node * microbatches, (node + 1) * microbatches):
            seconds[op], takes[op], needs[op] = job.seconds[node], job.takes[node], job.needs[node]
    for position in range(total):
        if codes[position] < total:
            continue
        op = codes[position] - total
        order[position] = op
        node = op // microbatches
        if node % 3 == 2:
            gone[op] = 1
        else:
            seconds[op] = job.whole[node]
            takes[op] = job.takes[node] + job.takes[node + 1]
            needs[op] = job.full[node]
    return order, gone, seconds, takes, needs


def fold(job: Job, order: Ints, gone: Ints) -> list[int]:
    """Reverse `unfold`."""
    codes = list(order)
    if min(job.full) == NEVER:
        return codes
    for position in range(len(order)):
        op = order[position]
        kind = op // job.microbatches % 3
        if gone[op] or (kind == 1 and gone[op + job.microbatches]):
            codes[position] = op + len(order)
    return codes


def link(job: Job, codes: Ints) -> Lists:
    """Linked lists of an order, for annealing."""
    order, gone, seconds, takes, needs = unfold(job, codes)
    total = len(order)
    place, before, after, held = [0] * total, [-1] * total, [-1] * total, [0.0] * total
    first, last = [-1] * job.ranks, [-1] * job.ranks
    for position in range(total):
        op = order[position]
        place[op] = position
        if gone[op]:
            continue
        rank = job.rank[op // job.microbatches]
        previous = last[rank]
        before[op] = previous
        held[op] = takes[op]
        if previous < 0:
            first[rank] = op
        else:
            after[previous] = op
            held[op] += held[previous]
        last[rank] = op
    return Lists(order, place, gone, seconds, takes, needs, before, after, held, first, last)


def go(job: Job, lists: Lists, op: int, later: bool, jump: int) -> Move:
    """Move the op past others of its rank, as far as at most `jump` of them allow."""
    place, before, after = lists.place, lists.before, lists.after
    other = reach_later(job, lists, op, jump) if later else reach_earlier(job, lists, op, jump)
    if other == op:
        return Move(NONE, op, 0, 0, 0, 0, 0, 0)
    position, anchor = place[op], before[op]
    follower = after[other] if later else after[op]
    left, right = min(position, place[other]), max(position, place[other])
    shift(job, lists, op, other if later else before[other], place[other])
    leader = anchor if later else before[op]
    early = place[leader] if leader >= 0 else left
    late = place[follower] if follower >= 0 else right
    return Move(SHIFTED, op, anchor, position, left, right, early, late)


def flip(job: Job, lists: Lists, op: int) -> Move:
    """Merge an I and its W to a B, or split it with the W right after the I. The op may be either of them."""
    place, before, after = lists.place, lists.before, lists.after
    node = op // job.microbatches
    if node % 3 == 2:
        op, node = op - job.microbatches, node - 1
    if node % 3 == 0 or job.full[node] >= NEVER:
        return Move(NONE, op, 0, 0, 0, 0, 0, 0)
    weight = op + job.microbatches
    least = lists.held[before[op]] if before[op] >= 0 else 0.0
    anchor, position = before[weight], place[weight]
    if not lists.gone[weight]:
        kind, follower = MERGED, after[weight]
        if least + job.full[node] > job.limit[job.rank[node]]:
            return Move(NONE, op, 0, 0, 0, 0, 0, 0)
        merge(job, lists, op)
    else:
        kind, follower = PARTED, after[op]
        if least + max(job.needs[node], job.takes[node] + job.needs[node + 1]) > job.limit[job.rank[node]]:
            return Move(NONE, op, 0, 0, 0, 0, 0, 0)
        part(job, lists, op, op, place[op] + 1 if position > place[op] else place[op])
    # The I takes another time, which also affects those that it waits for.
    early = place[op]
    if before[op] >= 0:
        early = min(early, place[before[op]])
    if job.feeder[node] >= 0:
        early = min(early, place[op + (job.feeder[node] - node) * job.microbatches])
    late = place[follower] if follower >= 0 else place[weight]
    return Move(kind, op, anchor, position, place[op], place[weight], early, late)


def make_room(job: Job, lists: Lists, op: int, jump: int) -> Move:
    """Merge the nearest I before this op, at most `jump` away, whose W comes after it."""
    microbatches = job.microbatches
    other = op
    for _ in range(jump):
        other = lists.before[other]
        if other < 0:
            break
        weight = other + microbatches
        if job.full[other // microbatches] < NEVER and not lists.gone[weight] and lists.place[weight] > lists.place[op]:
            return flip(job, lists, other)
    return Move(NONE, op, 0, 0, 0, 0, 0, 0)


def undo(job: Job, lists: Lists, move: Move) -> None:
    """Undo the move."""
    if move.kind == SHIFTED:
        shift(job, lists, move.op, move.anchor, move.position)
    elif move.kind == MERGED:
        part(job, lists, move.op, move.anchor, move.position)
    else:
        merge(job, lists, move.op)
        put(lists, move.op + job.microbatches, move.position)


def reach_later(job: Job, lists: Lists, op: int, jump: int) -> int:
    """Farthest op on the same rank, at most `jump` away, after which `op` can go; `op` if none."""
    place, after, held, required = lists.place, lists.after, lists.held, lists.needs
    microbatches = job.microbatches
    node, microbatch = op // microbatches, op % microbatches
    takes, needs, limit = lists.takes[op], required[op], job.limit[job.rank[node]]
    farthest, other = op, op
    barrier = len(place)
    if job.fed[node] >= 0:
        barrier = place[job.fed[node] * microbatches + microbatch]
    if node % 3 == 1 and not lists.gone[op + microbatches]:
        barrier = min(barrier, place[op + microbatches])
    for _ in range(jump):
        least = held[other] - takes
        other = after[other]
        if other < 0 or place[other] >= barrier:
            break
        if other // microbatches == node or least + required[other] > limit:
            break
        if held[other] - takes + needs <= limit:
            farthest = other
    return farthest


def reach_earlier(job: Job, lists: Lists, op: int, jump: int) -> int:
    """Farthest op on the same rank, at most `jump` away, before which `op` can go; `op` if none."""
    place, before, held, required = lists.place, lists.before, lists.held, lists.needs
    microbatches = job.microbatches
    node, microbatch = op // microbatches, op % microbatches
    takes, needs, limit = lists.takes[op], required[op], job.limit[job.rank[node]]
    farthest, other = op, op
    barrier = -1
    if job.feeder[node] >= 0:
        barrier = place[job.feeder[node] * microbatches + microbatch]
    for _ in range(jump):
        other = before[other]
        if other < 0 or place[other] <= barrier:
            break
        least = held[before[other]] if before[other] >= 0 else 0.0
        if other // microbatches == node or least + takes + required[other] > limit:
            break
        if least + needs <= limit:
            farthest = other
    return farthest


def shift(job: Job, lists: Lists, op: int, anchor: int, position: int) -> None:
    """Move `op` to `position` of the order, which is right after `anchor` (-1: nothing) on its rank."""
    after, rank = lists.after, job.rank[op // job.microbatches]
    later = position > lists.place[op]
    put(lists, op, position)
    # The memory changes for all ops between the old and the new place.
    start, until = (after[op], anchor) if later else (op, after[op])
    take_out(lists, op, rank)
    put_in(lists, op, anchor, rank)
    weigh(lists, start, after[op] if later else until)


def merge(job: Job, lists: Lists, op: int) -> None:
    """Merge this I and its W to a B. The W keeps its place in the order."""
    node, weight = op // job.microbatches, op + job.microbatches
    follower = lists.after[weight]
    take_out(lists, weight, job.rank[node])
    lists.gone[weight] = 1
    lists.seconds[op] = job.whole[node]
    lists.takes[op] = job.takes[node] + job.takes[node + 1]
    lists.needs[op] = job.full[node]
    weigh(lists, op, follower)


def part(job: Job, lists: Lists, op: int, anchor: int, position: int) -> None:
    """Split a B: its W goes to `position` of the order, which is right after `anchor` on its rank."""
    node, weight = op // job.microbatches, op + job.microbatches
    put(lists, weight, position)
    put_in(lists, weight, anchor, job.rank[node])
    lists.gone[weight] = 0
    lists.seconds[op], lists.takes[op], lists.needs[op] = job.seconds[node], job.takes[node], job.needs[node]
    lists.seconds[weight], lists.takes[weight] = job.seconds[node + 1], job.takes[node + 1]
    lists.needs[weight] = job.needs[node + 1]
    weigh(lists, op, lists.after[weight])


def put(lists: Lists, op: int, position: int) -> None:
    """Move an op to a position of the order."""
    order, place = lists.order, lists.place
    step = 1 if position > place[op] else -1
    for at in range(place[op], position, step):
        order[at] = order[at + step]
        place[order[at]] = at
    order[position] = op
    place[op] = position


def take_out(lists: Lists, op: int, rank: int) -> None:
    """Remove an op from its rank's chain."""
    before, after = lists.before, lists.after
    if before[op] >= 0:
        after[before[op]] = after[op]
    else:
        lists.first[rank] = after[op]
    if after[op] >= 0:
        before[after[op]] = before[op]
    else:
        lists.last[rank] = before[op]


def put_in(lists: Lists, op: int, anchor: int, rank: int) -> None:
    """Insert an op into its rank's chain, after `anchor`."""
    before, after = lists.before, lists.after
    follower = after[anchor] if anchor >= 0 else lists.first[rank]
    before[op], after[op] = anchor, follower
    if anchor >= 0:
        after[anchor] = op
    else:
        lists.first[rank] = op
    if follower >= 0:
        before[follower] = op
    else:
        lists.last[rank] = op


def weigh(lists: Lists, start: int, stop: int) -> None:
    """Update the memory of the rank from `start` on, until `stop`."""
    takes, before, after, held = lists.takes, lists.before, lists.after, lists.held
    each = start
    while each != stop:
        held[each] = takes[each] + (held[before[each]] if before[each] >= 0 else 0.0)
        each = after[each]


def replay(
    job: Job,
    lists: Lists,
    end: list[float],
    backup: list[float],
    tail: Floats,
    begin: int,
    right: int,
    horizon: int,
    allowed: float,
) -> tuple[int, bool]:
    """Time the ops again from position `begin` of the order on. The old ends go to `backup`, by position.

    After the position `right` the order is the one for which `tail` holds, which shows early if it gets too long. It
    stops after `horizon` where no end changes any more.

    Returns:
        The last position that it timed, and False if the length is sure to exceed `allowed`.
    """
    order, place, before, after = lists.order, lists.place, lists.before, lists.after
    gone, seconds = lists.gone, lists.seconds
    microbatches = job.microbatches
    position = begin
    while position < len(order) and position <= horizon:
        op = order[position]
        if gone[op]:
            backup[position] = end[op]
            position += 1
            continue
        node = op // microbatches
        start = end[before[op]] if before[op] >= 0 else job.origin[job.rank[node]]
        feeder = job.feeder[node]
        if feeder >= 0:
            start = max(start, end[op + (feeder - node) * microbatches] + job.lag[node])
        stop = start + seconds[op]
        backup[position] = end[op]
        position += 1
        if stop != end[op]:
            end[op] = stop
            if position > right + 1 and stop + tail[op] > allowed:
                return position, False
            if after[op] >= 0:
                horizon = max(horizon, place[after[op]])
            if job.fed[node] >= 0:
                horizon = max(horizon, place[op + (job.fed[node] - node) * microbatches])
    return position, True


def look_ahead(job: Job, lists: Lists, tail: list[float], left: int, right: int) -> int:
    """Update the least time from the end of each op to the end of all, after a change between `left` and `right`.

    Returns:
        Number of ops that it visited.
    """
    order, place, before, after = lists.order, lists.place, lists.before, lists.after
    gone, seconds = lists.gone, lists.seconds
    microbatches = job.microbatches
    horizon = left
    position = right
    while position >= 0 and position >= horizon:
        op = order[position]
        if gone[op]:
            position -= 1
            continue
        node = op // microbatches
        following, longest = after[op], -job.origin[job.rank[node]]
        if following >= 0:
            longest = max(longest, seconds[following] + tail[following])
        user = job.fed[node]
        if user >= 0:
            result = op + (user - node) * microbatches
            longest = max(longest, job.lag[user] + seconds[result] + tail[result])
        if longest != tail[op]:
            tail[op] = longest
            if before[op] >= 0:
                horizon = min(horizon, place[before[op]])
            if job.feeder[node] >= 0:
                horizon = min(horizon, place[op + (job.feeder[node] - node) * microbatches])
        position -= 1
    return right - position


def justify(job: Job, mirrored: Job, order: Ints) -> tuple[float, list[int]]:
    """Move all ops as late as possible, beginning at the end, and then all as early as possible.

    Known as forward-backward improvement in project scheduling with limited resources. Ops that move to the end open
    gaps at the start that others can fill, and the other way round. `mirrored` is the job in reversed time.

    Returns:
        A length that is not greater, and the ops in the order of their starts.
    """
    _, late = squeeze(mirrored, mirror(order, job.microbatches))
    return squeeze(job, mirror(late, job.microbatches))


def mirror(order: Ints, microbatches: int) -> list[int]:
    """The order in reversed time, in which the last microbatch is the first one."""
    total = len(order)
    mirrored = [0] * total
    for position in range(total):
        op = order[position]
        mirrored[total - 1 - position] = op + microbatches - 1 - 2 * (op % microbatches)
    return mirrored


def squeeze(job: Job, order: Ints) -> tuple[float, list[int]]:
    """Run each op in turn as soon as possible, also before placed ops of its rank. Returns the same as `justify`."""
    total, microbatches = len(order), job.microbatches
    ops, gone, seconds, takes, needs = unfold(job, order)
    begin, end, held = [0.0] * total, [0.0] * total, [0.0] * total
    before, after = [-1] * total, [-1] * total
    first, last = [-1] * job.ranks, [-1] * job.ranks
    lists = Lists(ops, [0] * total, gone, seconds, takes, needs, before, after, held, first, last)
    length = 0.0
    for op in ops:
        if gone[op]:
            continue
        node = op // microbatches
        rank = job.rank[node]
        ready = job.origin[rank]
        if job.feeder[node] >= 0:
            ready = max(ready, end[op + (job.feeder[node] - node) * microbatches] + job.lag[node])
        if job.after[node] >= 0:
            ready = max(ready, end[op + (job.after[node] - node) * microbatches])
        behind = earliest_gap(job, lists, op, ready, begin, end)
        begin[op] = max(ready, end[behind]) if behind >= 0 else ready
        end[op] = begin[op] + seconds[op]
        length = max(length, end[op] - job.origin[rank])
        held[op] = takes[op] + (held[behind] if behind >= 0 else 0.0)
        put_in(lists, op, behind, rank)
        following = after[op]
        while following >= 0:
            held[following] += takes[op]
            following = after[following]
    return length, fold(job, sort_by_start(job, lists, begin, end), gone)


def earliest_gap(job: Job, lists: Lists, op: int, ready: float, begin: Floats, end: Floats) -> int:
    """Placed op of its rank after which `op` can start the earliest; -1 to be the first.

    Microbatches stay in order, so a stage sends them in the order in which the next one receives them.
    """
    needs, held, before = lists.needs, lists.held, lists.before
    node, seconds, takes = op // job.microbatches, lists.seconds[op], lists.takes[op]
    limit = job.limit[job.rank[node]]
    best = follower = lists.last[job.rank[node]]
    while follower >= 0 and begin[follower] >= ready + seconds and follower // job.microbatches != node:
        previous = before[follower]
        least = held[previous] if previous >= 0 else 0.0
        if least + takes + needs[follower] > limit:
            break
        start = max(ready, end[previous]) if previous >= 0 else ready
        fits = least + needs[op] <= limit
        # It only moves if it gains time. Otherwise an op of no time could pass its dependency.
        if fits and start < begin[follower] and start + seconds <= begin[follower]:
            best = previous
        follower = previous
    return best


def sort_by_start(job: Job, lists: Lists, begin: Floats, end: Floats) -> list[int]:
    """Ops of all ranks sorted by start. Ties: the earlier end first, then the previous order.

    A W that is part of a B comes right after its I.
    """
    order, place = lists.order, lists.place
    for position in range(len(order)):
        place[order[position]] = position
    heads = list(lists.first)
    merged = [0] * len(order)
    position = 0
    while position < len(order):
        chosen = -1
        for op in heads:
            if op >= 0 and (
                chosen < 0 or (begin[op], end[op], place[op]) < (begin[chosen], end[chosen], place[chosen])
            ):
                chosen = op
        merged[position] = chosen
        position += 1
        node = chosen // job.microbatches
        heads[job.rank[node]] = lists.after[chosen]
        if node % 3 == 1 and lists.gone[chosen + job.microbatches]:
            merged[position] = chosen + job.microbatches
            position += 1
    return merged


def starts(job: Job, order: Ints) -> list[float]:
    """Starts of the ops if the ranks run them in this order, by position. A W starts with its B."""
    microbatches = job.microbatches
    ops, gone, seconds, _, _ = unfold(job, order)
    clock = list(job.origin)
    end = [0.0] * len(order)
    begin = [0.0] * len(order)
    for position in range(len(order)):
        op = ops[position]
        node = op // microbatches
        if gone[op]:
            begin[position] = end[op - microbatches] - seconds[op - microbatches]
            continue
        feeder = job.feeder[node]
        begin[position] = clock[job.rank[node]]
        if feeder >= 0:
            begin[position] = max(begin[position], end[op + (feeder - node) * microbatches] + job.lag[node])
        end[op] = begin[position] + seconds[op]
        clock[job.rank[node]] = end[op]
    return begin


def measure(job: Job, last: Ints, end: Floats) -> float:
    """Length of the order."""
    longest = 0.0
    for rank in range(job.ranks):
        longest = max(longest, end[last[rank]] - job.origin[rank])
    return longest


def critical_ops(job: Job, lists: Lists, end: Floats, lag: Floats, path: list[int]) -> None:
    """Fill `path` with a chain of ops, each waiting for the next, from the one that ends last; `lag` is by op."""
    before, last = lists.before, lists.last
    microbatches = job.microbatches
    worst, longest = 0, -1.0
    for rank in range(job.ranks):
        if end[last[rank]] - job.origin[rank] > longest:
            worst, longest = rank, end[last[rank]] - job.origin[rank]
    path.clear()
    op = last[worst]
    while op >= 0:
        path.append(op)
        node = op // microbatches
        feeder = job.feeder[node]
        source = op + (feeder - node) * microbatches if feeder >= 0 else -1
        previous = before[op]
        if previous < 0 or (source >= 0 and end[source] + lag[op] > end[previous]):
            previous = source
        op = previous
