"""The inner loops of the search, on plain numbers: list scheduling, justifying, and annealing of an order of ops.

These functions run as they are, and as machine code where numba is installed (`zbpipe.planner.engine`), with the same
results. So they keep to what numba can compile: flat sequences, loops, no objects but the `Job`. That is why some are
longer, and take more arguments, than elsewhere: what an object would hold they hand on as lists, and a call in the
innermost loop costs time. An op's dependencies are repeated here in numbers, as `feeder` and `fed`; the tests compare
the times with `zbpipe.simulate`.

A *node* is 3 * stage + kind, kind being 0 for F, 1 for I and 2 for W; op number node * microbatches + microbatch stands
for one op. An order of all ops is *sound* if no op comes before its dependencies; then the ranks, which run their ops
in that order, cannot end up waiting for each other in a circle.

A full backward B is an I that takes its W along. In an order both have the number of all ops added to theirs, and the
place of that W means nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

Floats = Sequence[float]
Ints = Sequence[int]

NEVER = 1e300
"""Later than anything."""
GONE = -1.0
"""When a W arrives that is part of a B."""


class Job(NamedTuple):
    """What to schedule: one number for each node unless said otherwise."""

    ranks: int
    microbatches: int
    rank: Ints
    """Where the node runs."""
    feeder: Ints
    """The node whose result it takes, -1 for the first stage's F."""
    after: Ints
    """Another node, of its own rank, that has to come first; -1 for none."""
    lag: Floats
    """Seconds that this result takes to arrive."""
    fed: Ints
    """The node of another stage that takes its result, or the last stage's I for its F; -1 for none."""
    seconds: Floats
    takes: Floats
    """What running it adds to the memory of its rank, from then on: positive for F, negative for W, either for I."""
    needs: Floats
    """What has to be free on its rank for it to run: what it takes, and what it needs only while it runs."""
    full: Floats
    """What a full backward in place of an I needs; `NEVER` for all other nodes, and where it would save nothing."""
    reserve: Floats
    """What list scheduling leaves free after it, so that the microbatch can go on."""
    ahead: Floats
    """The same for an F while no I of its microbatch is over and any F takes room there; or `NEVER`: not enough."""
    limit: Floats
    """By rank: what it can hold."""
    origin: Floats
    """By rank: when its step begins. The *length* of an order is the longest time from there to the end of a rank; with
    zeros it is the makespan."""


def list_schedule(
    job: Job, urgency: Floats, period: float, patience: float, release: float, margin: Floats, cutoff: float
) -> tuple[float, list[int]]:
    """A clock runs, and a rank that is free starts the most urgent op that is ready and fits into memory.

    Args:
        job: what to schedule.
        urgency: by node, of microbatch 0; the least is the most urgent. Microbatch m has m * `period` more.
        period: seconds between microbatches in `urgency`.
        patience: seconds that a rank waits for an op that is more urgent than those that are ready.
        release: seconds between the microbatches that may enter the first stage.
        margin: by node, what has to stay free behind an I while there are F to come; else B runs in its place.
        cutoff: give up as soon as the length has to reach this.

    Returns:
        The length, and the ops in the order of their starts. Or infinity, if it gave up or cannot go on.
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
            job, mine[rank], now, free[rank], room, urgency, period, patience, ran, sent, arrival
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
            end += job.seconds[chosen + 1]
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
    """By rank: its nodes, how many ops it has to run, how many of them are F, and the seconds that all take."""
    mine = [[0 for _ in range(0)] for _ in range(job.ranks)]
    left, forwards = [0] * job.ranks, [0] * job.ranks
    work = [0.0] * job.ranks
    for node in range(len(job.rank)):
        rank = job.rank[node]
        mine[rank].append(node)
        left[rank] += job.microbatches
        forwards[rank] += job.microbatches if node % 3 == 0 else 0
        work[rank] += job.microbatches * job.seconds[node]
    return mine, left, forwards, work


def earliest(times: Floats) -> tuple[int, float]:
    """The index of the first of the least, and the least."""
    least = 0
    for each in range(1, len(times)):
        if times[each] < times[least]:
            least = each
    return least, times[least]


def rooms(job: Job) -> tuple[list[float], list[float]]:
    """By node, what has to be free for list scheduling to start it, each I apart from its W; and the same with B."""
    apart = [max(job.needs[node], job.takes[node] + job.reserve[node]) for node in range(len(job.rank))]
    return apart, [min(apart[node], job.full[node]) for node in range(len(job.rank))]


def skip_gone(job: Job, node: int, ran: list[int], arrival: Floats) -> None:
    """Count the next W of this node as run if they were part of a B."""
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
) -> tuple[int, float, float]:
    """The most urgent of a rank's `nodes` (-1: none), when its input arrives, and when to look again for others."""
    chosen, least, start, wake = -1, NEVER, 0.0, NEVER
    reserve = left_free(job, nodes, ran)
    for node in nodes:
        microbatch = ran[node]
        if microbatch >= sent[node]:
            continue
        # An F may take the last room if another microbatch needs none to go on.
        if room[node] > free and (node % 3 or max(job.needs[node], job.takes[node] + reserve) > free):
            continue
        arrived = arrival[node * job.microbatches + microbatch]
        urgent = urgency[node] + period * microbatch
        if arrived - patience > now:
            wake = min(wake, arrived - patience)
        elif urgent < least:
            chosen, least, start = node, urgent, arrived
    return chosen, start, wake


def left_free(job: Job, nodes: Ints, ran: Ints) -> float:
    """What has to stay free on a rank so that one of the microbatches on their way can go on; then it makes room.

    The rank holds all that it has run of them, for no I of them is over. The one on the latest stage needs the least.
    """
    least = NEVER
    for node in nodes:
        if node % 3 == 0 and ran[node] > ran[node + 1]:
            least = min(least, job.ahead[node])
    return least


class Lists(NamedTuple):
    """An order of ops, as annealing works on it. By op unless said otherwise."""

    order: list[int]
    """By position: the ops."""
    place: list[int]
    """Its position."""
    gone: list[int]
    """1 for a W that is part of a B. It keeps a place in the order, which means nothing."""
    seconds: list[float]
    takes: list[float]
    needs: list[float]
    before: list[int]
    """The op before it on its rank, -1 for none."""
    after: list[int]
    held: list[float]
    """What its rank holds from its start on."""
    first: list[int]
    """By rank: its first op."""
    last: list[int]


class Move(NamedTuple):
    """A change of the order, with what undoes it and what it may change in time."""

    kind: int
    """`NONE`, `SHIFTED`, `MERGED` or `PARTED`."""
    op: int
    """What moved, or the I that took up its W or let go of it."""
    anchor: int
    """The op behind which it, or the W, stood on its rank; -1 for none."""
    position: int
    """Where that stood in the order."""
    left: int
    """The first position that changed."""
    right: int
    """The last one."""
    early: int
    """The first position from which on there may be another time to the end of all."""
    late: int
    """The last position that surely has to be timed anew."""


NONE, SHIFTED, MERGED, PARTED = 0, 1, 2, 3


def anneal(job: Job, start: Ints, target: float, heat: float, work: int, seed: int) -> tuple[float, list[int], int]:
    """Move ops of the critical path back and forth on their rank, and keep what is not longer, or not much.

    Where a full backward saves memory, it also makes one of an I and its W, and takes them apart again.

    Args:
        job: what to schedule.
        start: a sound order within the limits.
        target: seconds at which it stops.
        heat: seconds that one move may lose at the start; it falls to zero.
        work: how many ops to time anew before it ends.
        seed: of the random numbers, 1 to 2147483646.

    Returns:
        The length of the best order, that order, and how much of the work was done.
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
    """Change something about an op of `path`, where B `merges` I and W also which of them it is; and the next seed."""
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
    """The ops of an order; and by op 1 for a W that is part of a B, seconds, what it takes, and what it needs."""
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
            seconds[op] = job.seconds[node] + job.seconds[node + 1]
            takes[op] = job.takes[node] + job.takes[node + 1]
            needs[op] = job.full[node]
    return order, gone, seconds, takes, needs


def fold(job: Job, order: Ints, gone: Ints) -> list[int]:
    """The other way round."""
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
    """The lists that annealing works on."""
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
    """Shift the op past others of its rank, as far as at most `jump` of them let it."""
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
    """Make a B of an I and its W, or take it apart with the W right behind the I; either of them may be named."""
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
    # The I takes another time, which those that it waits for see, too.
    early = place[op]
    if before[op] >= 0:
        early = min(early, place[before[op]])
    if job.feeder[node] >= 0:
        early = min(early, place[op + (job.feeder[node] - node) * job.microbatches])
    late = place[follower] if follower >= 0 else place[weight]
    return Move(kind, op, anchor, position, place[op], place[weight], early, late)


def make_room(job: Job, lists: Lists, op: int, jump: int) -> Move:
    """Make a B of the nearest I before this op, at most `jump` away, whose W waits until after it."""
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
    """Put everything back."""
    if move.kind == SHIFTED:
        shift(job, lists, move.op, move.anchor, move.position)
    elif move.kind == MERGED:
        part(job, lists, move.op, move.anchor, move.position)
    else:
        merge(job, lists, move.op)
        put(lists, move.op + job.microbatches, move.position)


def reach_later(job: Job, lists: Lists, op: int, jump: int) -> int:
    """The farthest op on the same rank, at most `jump` away, that `op` can go behind; `op` if none."""
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
    """The same for the farthest op that `op` can go in front of."""
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
    """Put `op` at `position` of the order, which is right after `anchor` (-1: nothing) on its rank."""
    after, rank = lists.after, job.rank[op // job.microbatches]
    later = position > lists.place[op]
    put(lists, op, position)
    # The memory changes for all between the old and the new place.
    start, until = (after[op], anchor) if later else (op, after[op])
    take_out(lists, op, rank)
    put_in(lists, op, anchor, rank)
    weigh(lists, start, after[op] if later else until)


def merge(job: Job, lists: Lists, op: int) -> None:
    """Make a B of this I and its W, which keeps its place in the order."""
    node, weight = op // job.microbatches, op + job.microbatches
    follower = lists.after[weight]
    take_out(lists, weight, job.rank[node])
    lists.gone[weight] = 1
    lists.seconds[op] = job.seconds[node] + job.seconds[node + 1]
    lists.takes[op] = job.takes[node] + job.takes[node + 1]
    lists.needs[op] = job.full[node]
    weigh(lists, op, follower)


def part(job: Job, lists: Lists, op: int, anchor: int, position: int) -> None:
    """Take a B apart: its W goes to `position` of the order, which is right after `anchor` on its rank."""
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
    """Out of its rank's chain."""
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
    """Into its rank's chain, behind `anchor`."""
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
    """What the rank holds from `start` on, until `stop`."""
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
    """Time the ops again from position `begin` of the order on; the old ends go to `backup`, by position.

    Beyond the position `right` the order is the one for which `tail` holds, which shows early that it gets too long. It
    stops beyond `horizon` where no end changes any more.

    Returns:
        The position up to which it went, and False if the length is sure to be more than `allowed`.
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
    """The least time from the end of each op to the end of all, after a change between `left` and `right`.

    Returns:
        How many ops it looked at.
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

    Known as forward-backward improvement in project scheduling with limited resources: ops that move to the end open
    gaps at the start that others can fill, and the other way round. `mirrored` is the job in reversed time.

    Returns:
        A length that is no greater, and the ops in the order of their starts.
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
    """Run each op in turn as soon as possible, also before ops of its rank that are placed already; as `justify`."""
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
    """The placed op of its rank after which `op` can start the earliest; -1 to be the first.

    Microbatches stay in their order, so that a stage sends as the next one receives.
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
        # It only moves if it gains time, or an op of no time could pass the one that it waits for.
        if fits and start < begin[follower] and start + seconds <= begin[follower]:
            best = previous
        follower = previous
    return best


def sort_by_start(job: Job, lists: Lists, begin: Floats, end: Floats) -> list[int]:
    """The ops of all ranks by their starts; of equal starts the earlier end first, then as before.

    A W that is part of a B comes right behind its I.
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
    """When the ops start if the ranks run them in this order, by position; a W with its B."""
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
    """The length."""
    longest = 0.0
    for rank in range(job.ranks):
        longest = max(longest, end[last[rank]] - job.origin[rank])
    return longest


def critical_ops(job: Job, lists: Lists, end: Floats, lag: Floats, path: list[int]) -> None:
    """Fill `path` with ops that each wait for the next in it, from the one that ends last on; `lag` is by op."""
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
