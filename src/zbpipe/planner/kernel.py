"""The inner loops of the search, on plain numbers: list scheduling, and annealing of an order of ops.

These functions run as they are, and as machine code where numba is installed (`zbpipe.planner.engine`), with the same
results. So they keep to what numba can compile: flat sequences, loops, no objects but the `Job`. That is why some are
longer, and take more arguments, than elsewhere: what an object would hold they hand on as lists, and a call in the
innermost loop costs time. What feeds an op is repeated here in numbers, as `feeder` and `fed`; the tests compare the
times with `zbpipe.simulate`.

A *node* is 3 * stage + kind, kind being 0 for F, 1 for I and 2 for W; op number node * microbatches + microbatch stands
for one op. An order of all ops is *sound* if no op comes before one that feeds it; then the ranks, which run their ops
in that order, cannot end up waiting for each other in a circle.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

Floats = Sequence[float]
Ints = Sequence[int]

NEVER = 1e300
"""Later than anything."""


class Job(NamedTuple):
    """What there is to schedule: one number a node unless said otherwise."""

    ranks: int
    microbatches: int
    rank: Ints
    """Where the node runs."""
    feeder: Ints
    """The node whose result it takes, -1 for the first stage's F."""
    after: Ints
    """A node of its own rank that comes first as well, -1 for none."""
    lag: Floats
    """Seconds that the result is on its way."""
    fed: Ints
    """The node of another stage that takes its result, or the last stage's I for its F; -1 for none."""
    seconds: Floats
    takes: Floats
    """What running it adds to the memory of its rank: positive for F, negative for I and W."""
    reserve: Floats
    """What has to stay free on the rank when it starts; not zero only for F."""
    limit: Floats
    """By rank: what it may hold."""
    origin: Floats
    """By rank: the time from which on its span counts. Zeros minimise the makespan."""


def list_schedule(
    job: Job, urgency: Floats, period: float, patience: float, release: float, cutoff: float
) -> tuple[float, list[int]]:
    """A clock runs, and a rank that is free starts the most urgent op that is ready and fits into memory.

    Args:
        job: what to schedule.
        urgency: by node, of microbatch 0; the least is the most urgent. Microbatch m has m * `period` more.
        period: see there.
        patience: seconds that a rank waits for an op that is more urgent than those that are ready.
        release: seconds between the microbatches that may enter the first stage.
        cutoff: give up as soon as the makespan has to reach this.

    Returns:
        The makespan, and the ops in the order of their starts. Or infinity, if it gave up or cannot go on.
    """
    nodes, microbatches = len(job.rank), job.microbatches
    mine = [[0 for _ in range(0)] for _ in range(job.ranks)]
    left = [0] * job.ranks
    work = [0.0] * job.ranks
    for node in range(nodes):
        rank = job.rank[node]
        mine[rank].append(node)
        left[rank] += microbatches
        work[rank] += microbatches * job.seconds[node]
    free = list(job.limit)
    busy = [0.0] * job.ranks
    wake = [0.0] * job.ranks
    ran = [0] * nodes
    sent = [0] * nodes
    arrival = [0.0] * (nodes * microbatches)
    sent[0] = microbatches
    for microbatch in range(microbatches):
        arrival[microbatch] = release * microbatch
    order = [0 for _ in range(0)]
    makespan = 0.0
    while True:
        rank = 0
        for other in range(1, job.ranks):
            if wake[other] < wake[rank]:
                rank = other
        now = wake[rank]
        if now >= NEVER:
            break
        chosen, start, wake[rank] = choose(
            job, mine[rank], now, free[rank], urgency, period, patience, ran, sent, arrival
        )
        if chosen < 0:
            continue
        if start > now:
            wake[rank] = start
            continue
        if now + work[rank] >= cutoff:
            return NEVER, order
        op = chosen * microbatches + ran[chosen]
        end = now + job.seconds[chosen]
        order.append(op)
        makespan = max(makespan, end)
        busy[rank] = end
        work[rank] -= job.seconds[chosen]
        free[rank] -= job.takes[chosen]
        left[rank] -= 1
        wake[rank] = end if left[rank] else NEVER
        users = [job.fed[chosen], chosen + 1] if chosen % 3 == 1 else [job.fed[chosen]]
        for user in users:
            if user >= 0:
                arrived = end + job.lag[user]
                arrival[user * microbatches + ran[chosen]] = arrived
                sent[user] += 1
                receiver = job.rank[user]
                wake[receiver] = min(wake[receiver], max(arrived - patience, busy[receiver]))
        ran[chosen] += 1
    return (makespan if len(order) == nodes * microbatches else NEVER), order


def choose(
    job: Job,
    nodes: Ints,
    now: float,
    free: float,
    urgency: Floats,
    period: float,
    patience: float,
    ran: Ints,
    sent: Ints,
    arrival: Floats,
) -> tuple[int, float, float]:
    """The most urgent of a rank's `nodes` (-1: none), when its input arrives, and when to look again for others."""
    chosen, least, start, wake = -1, NEVER, 0.0, NEVER
    for node in nodes:
        microbatch = ran[node]
        if microbatch >= sent[node] or job.takes[node] + job.reserve[node] > free:
            continue
        arrived = arrival[node * job.microbatches + microbatch]
        urgent = urgency[node] + period * microbatch
        if arrived - patience > now:
            wake = min(wake, arrived - patience)
        elif urgent < least:
            chosen, least, start = node, urgent, arrived
    return chosen, start, wake


def anneal(job: Job, start: Ints, target: float, heat: float, work: int, seed: int) -> tuple[float, list[int], int]:
    """Move ops of the critical path back and forth on their rank, and keep what is not longer, or not much.

    Args:
        job: what to schedule.
        start: a sound order within the limits.
        target: stop when the order is as short as this.
        heat: what may be lost by one move, in seconds, at the beginning; it falls to nothing.
        work: how many ops to time anew before it ends.
        seed: of the random numbers, 1 to 2147483646.

    Returns:
        The length of the best order, that order, and how much of the work was done.
    """
    total = len(start)
    order = list(start)
    place, before, after = [0] * total, [-1] * total, [-1] * total
    end, backup, tail = [0.0] * total, [0.0] * total, [0.0] * total
    held = [0.0] * total
    first, last = [-1] * job.ranks, [-1] * job.ranks
    link(job, order, place, before, after, held, first, last)
    path = [0 for _ in range(0)]
    replay(job, order, place, before, after, end, backup, tail, 0, total - 1, NEVER)
    look_ahead(job, order, place, before, after, tail, 0, total - 1)
    length = measure(job, last, end)
    critical_ops(job, last, before, end, path)
    best, best_order = length, list(order)
    done = 0
    while done < work and best > target:
        done += 10
        seed = seed * 48271 % 2147483647
        op = path[seed % len(path)]
        seed = seed * 48271 % 2147483647
        share = seed / 2147483647.0
        jump = 1 + int(30 * share * share * share)
        seed = seed * 48271 % 2147483647
        later = seed % 2 == 0
        other = reach(job, op, later, jump, place, before, after, held)
        if other == op:
            continue
        left, right = min(place[op], place[other]), max(place[op], place[other])
        old_place, old_anchor = place[op], before[op]
        shift(job, op, other if later else before[other], place[other], order, place, before, after, held, first, last)
        seed = seed * 48271 % 2147483647
        allowed = length - heat * (1.0 - done / work) * math.log(seed / 2147483647.0)
        until, good = replay(job, order, place, before, after, end, backup, tail, left, right, allowed)
        done += until - left
        if good and measure(job, last, end) <= allowed:
            length = measure(job, last, end)
            critical_ops(job, last, before, end, path)
            done += len(path) + look_ahead(job, order, place, before, after, tail, left, right)
            if length < best * (1 - 1e-9):
                best = length
                for position in range(total):
                    best_order[position] = order[position]
        else:
            for position in range(left, until):
                end[order[position]] = backup[position]
            shift(job, op, old_anchor, old_place, order, place, before, after, held, first, last)
    return best, best_order, done


def link(
    job: Job,
    order: Ints,
    place: list[int],
    before: list[int],
    after: list[int],
    held: list[float],
    first: list[int],
    last: list[int],
) -> None:
    """Fill in, by op, its position, its neighbours on its rank, and what the rank holds from its start on."""
    for position in range(len(order)):
        op = order[position]
        place[op] = position
        node = op // job.microbatches
        rank = job.rank[node]
        previous = last[rank]
        before[op] = previous
        held[op] = job.takes[node]
        if previous < 0:
            first[rank] = op
        else:
            after[previous] = op
            held[op] += held[previous]
        last[rank] = op


def reach(job: Job, op: int, later: bool, jump: int, place: Ints, before: Ints, after: Ints, held: Floats) -> int:
    """The farthest op on the same rank, at most `jump` away, that `op` can change sides with; `op` if none."""
    microbatches = job.microbatches
    node, microbatch = op // microbatches, op % microbatches
    takes, limit = job.takes[node], job.limit[job.rank[node]]
    farthest, other = op, op
    if later:
        barrier = len(place)
        if job.fed[node] >= 0:
            barrier = place[job.fed[node] * microbatches + microbatch]
        if node % 3 == 1:
            barrier = min(barrier, place[op + microbatches])
        for _ in range(jump):
            other = after[other]
            if other < 0 or place[other] >= barrier or other // microbatches == node or held[other] - takes > limit:
                break
            farthest = other
    else:
        barrier = -1
        if job.feeder[node] >= 0:
            barrier = place[job.feeder[node] * microbatches + microbatch]
        for _ in range(jump):
            other = before[other]
            if other < 0 or place[other] <= barrier or other // microbatches == node:
                break
            most = held[other]
            if before[other] >= 0:
                most = max(most, held[before[other]])
            if most + takes > limit:
                break
            farthest = other
    return farthest


def shift(
    job: Job,
    op: int,
    anchor: int,
    position: int,
    order: list[int],
    place: list[int],
    before: list[int],
    after: list[int],
    held: list[float],
    first: list[int],
    last: list[int],
) -> None:
    """Put `op` at `position` of the order, which is right after `anchor` (-1: nothing) on its rank."""
    rank = job.rank[op // job.microbatches]
    step = 1 if position > place[op] else -1
    for at in range(place[op], position, step):
        order[at] = order[at + step]
        place[order[at]] = at
    order[position] = op
    place[op] = position
    # Out of the rank's chain, and in again; the memory changes for all between the old and the new place.
    until = after[op] if step < 0 else anchor
    start = after[op] if step > 0 else op
    if before[op] >= 0:
        after[before[op]] = after[op]
    else:
        first[rank] = after[op]
    if after[op] >= 0:
        before[after[op]] = before[op]
    else:
        last[rank] = before[op]
    follower = after[anchor] if anchor >= 0 else first[rank]
    before[op], after[op] = anchor, follower
    if anchor >= 0:
        after[anchor] = op
    else:
        first[rank] = op
    if follower >= 0:
        before[follower] = op
    else:
        last[rank] = op
    stop = until if step < 0 else after[op]
    each = start
    while each != stop:
        held[each] = job.takes[each // job.microbatches] + (held[before[each]] if before[each] >= 0 else 0.0)
        each = after[each]


def replay(
    job: Job,
    order: Ints,
    place: Ints,
    before: Ints,
    after: Ints,
    end: list[float],
    backup: list[float],
    tail: Floats,
    begin: int,
    right: int,
    allowed: float,
) -> tuple[int, bool]:
    """When the ops end, from position `begin` of the order on; what they were goes to `backup`, by position.

    Beyond the position `right` the order is the one for which `tail` holds, so it tells at once what is too long, and
    from where on nothing changes, all is as it was.

    Returns:
        The position up to which it went, and whether the makespan can be no more than `allowed`, as far as it knows.
    """
    microbatches = job.microbatches
    horizon = right
    position = begin
    while position < len(order) and position <= horizon:
        op = order[position]
        node = op // microbatches
        start = end[before[op]] if before[op] >= 0 else 0.0
        feeder = job.feeder[node]
        if feeder >= 0:
            start = max(start, end[op + (feeder - node) * microbatches] + job.lag[node])
        stop = start + job.seconds[node]
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


def look_ahead(
    job: Job, order: Ints, place: Ints, before: Ints, after: Ints, tail: list[float], left: int, right: int
) -> int:
    """How long it takes from the end of each op to the end of all, at the least, where `left` to `right` changed.

    Returns:
        How many ops it looked at.
    """
    microbatches = job.microbatches
    horizon = left
    position = right
    while position >= 0 and position >= horizon:
        op = order[position]
        node = op // microbatches
        following, longest = after[op], -job.origin[job.rank[node]]
        if following >= 0:
            longest = max(longest, job.seconds[following // microbatches] + tail[following])
        user = job.fed[node]
        if user >= 0:
            longest = max(longest, job.lag[user] + job.seconds[user] + tail[op + (user - node) * microbatches])
        if longest != tail[op]:
            tail[op] = longest
            if before[op] >= 0:
                horizon = min(horizon, place[before[op]])
            if job.feeder[node] >= 0:
                horizon = min(horizon, place[op + (job.feeder[node] - node) * microbatches])
        position -= 1
    return right - position


def justify(job: Job, mirrored: Job, order: Ints) -> tuple[float, list[int]]:
    """Put all ops as late as they can be, beginning at the end, and then all as soon as they can be.

    Forward-backward improvement, well known for projects with limited resources: what is pushed to the end opens gaps
    at the beginning that other ops can fill, and the other way round.

    Args:
        job: what is scheduled.
        mirrored: the same in reversed time.
        order: a sound order within the limits.

    Returns:
        A makespan that is no longer, and the ops in the order of their starts.
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
    """Let each op in turn run as soon as it can, also before ops of its rank that have got their place already.

    Args:
        job: what is scheduled.
        order: a sound order within the limits.

    Returns:
        A makespan that is no longer, and the ops in the order of their starts.
    """
    total, microbatches = len(order), job.microbatches
    begin, end, held = [0.0] * total, [0.0] * total, [0.0] * total
    before, after = [-1] * total, [-1] * total
    first, last = [-1] * job.ranks, [-1] * job.ranks
    makespan = 0.0
    for op in order:
        node = op // microbatches
        rank = job.rank[node]
        ready = 0.0
        if job.feeder[node] >= 0:
            ready = end[op + (job.feeder[node] - node) * microbatches] + job.lag[node]
        if job.after[node] >= 0:
            ready = max(ready, end[op + (job.after[node] - node) * microbatches])
        behind = earliest_gap(job, op, ready, last[rank], begin, end, held, before)
        following = after[behind] if behind >= 0 else first[rank]
        begin[op] = max(ready, end[behind]) if behind >= 0 else ready
        end[op] = begin[op] + job.seconds[node]
        makespan = max(makespan, end[op])
        held[op] = job.takes[node] + (held[behind] if behind >= 0 else 0.0)
        before[op], after[op] = behind, following
        if behind >= 0:
            after[behind] = op
        else:
            first[rank] = op
        if following >= 0:
            before[following] = op
        else:
            last[rank] = op
        while following >= 0:
            held[following] += job.takes[node]
            following = after[following]
    return makespan, in_time(job, order, first, after, begin, end)


def earliest_gap(
    job: Job, op: int, ready: float, latest: int, begin: Floats, end: Floats, held: Floats, before: Ints
) -> int:
    """The op on its rank after which `op` can run the soonest, from what the rank has so far; -1 for its first.

    Microbatches stay in their order, so that a stage sends as the next one receives.
    """
    node = op // job.microbatches
    seconds, takes, limit = job.seconds[node], job.takes[node], job.limit[job.rank[node]]
    best = follower = latest
    while follower >= 0 and begin[follower] >= ready + seconds and follower // job.microbatches != node:
        if takes > 0 and held[follower] + takes > limit:
            break
        previous = before[follower]
        start = max(ready, end[previous]) if previous >= 0 else ready
        fits = previous < 0 or held[previous] + takes <= limit
        # Without gain nothing moves, or what takes no time could pass what it waits for.
        if fits and start < begin[follower] and start + seconds <= begin[follower]:
            best = previous
        follower = previous
    return best


def in_time(job: Job, order: Ints, first: Ints, after: Ints, begin: Floats, end: Floats) -> list[int]:
    """The ops of all ranks by their starts. What takes no time comes before what starts with it, and else as before."""
    place = [0] * len(order)
    for position in range(len(order)):
        place[order[position]] = position
    heads = list(first)
    merged = [0] * len(order)
    for position in range(len(order)):
        chosen = -1
        for op in heads:
            if op >= 0 and (
                chosen < 0 or (begin[op], end[op], place[op]) < (begin[chosen], end[chosen], place[chosen])
            ):
                chosen = op
        merged[position] = chosen
        heads[job.rank[chosen // job.microbatches]] = after[chosen]
    return merged


def starts(job: Job, order: Ints) -> list[float]:
    """When the ops start if the ranks run them in this order, by position."""
    microbatches = job.microbatches
    clock = [0.0] * job.ranks
    end = [0.0] * len(order)
    begin = [0.0] * len(order)
    for position in range(len(order)):
        op = order[position]
        node = op // microbatches
        feeder = job.feeder[node]
        begin[position] = clock[job.rank[node]]
        if feeder >= 0:
            begin[position] = max(begin[position], end[op + (feeder - node) * microbatches] + job.lag[node])
        end[op] = begin[position] + job.seconds[node]
        clock[job.rank[node]] = end[op]
    return begin


def measure(job: Job, last: Ints, end: Floats) -> float:
    """The makespan, or the longest span of a rank if the job has origins."""
    longest = 0.0
    for rank in range(job.ranks):
        longest = max(longest, end[last[rank]] - job.origin[rank])
    return longest


def critical_ops(job: Job, last: Ints, before: Ints, end: Floats, path: list[int]) -> None:
    """Fill `path` with a chain of ops that each wait for the next in it, from the one that ends last."""
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
        if previous < 0 or (source >= 0 and end[source] + job.lag[node] > end[previous]):
            previous = source
        op = previous


HELPERS = (
    choose,
    mirror,
    squeeze,
    earliest_gap,
    in_time,
    link,
    reach,
    shift,
    replay,
    look_ahead,
    measure,
    critical_ops,
)
"""What the others are made of."""
