"""The inner loops of the search, on plain numbers: list scheduling, justifying, and annealing of an order of ops.

They run in Python, and with numba as machine code (`zbpipe.planner.engine`), with the same results. So they use only
types that numba can compile: numbers, and flat lists of numbers and records. Some functions are long, because calls in
the innermost loop cost time. Tests compare the times with `zbpipe.simulate`.

A *node* is 3 * stage + kind, with kind 0 for F, 1 for I and 2 for W. An op is the number node * microbatches +
microbatch. An order of all ops is *sound* if no op precedes its dependencies, so that no ranks deadlock. A full
backward B is an I that includes its W. In an order, both have the number of all ops added to theirs, and the place of
that W has no meaning.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

Number = TypeVar("Number", int, float, bool)
Floats = list[float]
Ints = list[int]

NEVER = 1e300
GONE = -1.0
"""Arrival time of a W that is part of a B."""


@dataclass(frozen=True, slots=True)
class Node:
    """Numbers that all microbatches of a node share."""

    rank: int
    feeder: int
    """Node of its input, -1 for the first stage's F."""
    fed: int
    """Node on another stage that takes its result, or for the last stage's F its I; -1 for none."""
    lag: float
    """Seconds until its input arrives."""
    seconds: float
    takes: float
    """Memory that it adds to its rank: positive for F, negative for W, either sign for I."""
    needs: float
    """Free memory that it needs: the memory that it adds, and its working memory."""
    whole: float = 0.0
    """Seconds of a full backward in place of an I."""
    full: float = NEVER
    """Free memory that this full backward needs, if B may save memory."""
    reserve: float = 0.0
    """Memory that list scheduling keeps free after it, so that the microbatch can continue."""
    ahead: float = NEVER
    """Like `reserve`, for an F before any I of its microbatch, if only F take memory there."""
    after: int = -1
    """Another node on its rank that precedes it in reversed time. -1 for none."""


class Job(NamedTuple):
    ranks: int
    microbatches: int
    merges: bool
    """Whether a full backward saves memory on any stage."""
    nodes: list[Node]
    limit: Floats
    """Memory limit of each rank."""
    origin: Floats
    """Start of each rank's step. An order's *length* is the longest time from a rank's start to its end; with zeros
    it is the makespan."""


def fill(count: int, value: Number) -> list[Number]:
    return [value] * count


def list_schedule(
    job: Job,
    needs: Floats,
    urgency: Floats,
    period: float,
    patience: float,
    release: float,
    margin: Floats,
    cutoff: float,
    first: bool,
) -> tuple[float, Ints]:
    """List scheduling: a clock runs, and each free rank starts the most urgent op that is ready and fits into memory.

    Args:
        job: the scheduling problem.
        needs: free memory that each node needs, at least the job's.
        urgency: urgency of each node for microbatch 0; the least is the most urgent.
        period: increase of the urgency per microbatch.
        patience: seconds that a rank waits for an op more urgent than the ready ones.
        release: seconds between the entries of microbatches into the first stage.
        margin: memory to keep free after an I of each node while F remain; otherwise B runs instead.
        cutoff: give up when the length is sure to reach this.
        first: whether ranks wait for each I of the first microbatch without limit. All other I follow it.

    Returns:
        The length, and the ops in the order of their starts. Infinity if it gave up or cannot continue.
    """
    nodes, microbatches = job.nodes, job.microbatches
    total = len(nodes) * microbatches
    head, sibling, left, forwards, work = loads(job)
    free = job.limit.copy()
    apart, room = rooms(job, needs)
    busy, wake = job.origin.copy(), job.origin.copy()
    ran, sent, arrival = fill(len(nodes), 0), fill(len(nodes), 0), fill(total, 0.0)
    for op in range(microbatches):
        arrival[op] = release * op
    sent[0] = microbatches
    order, count, length = fill(total, 0), 0, 0.0
    while True:
        rank, now = earliest(wake)
        if now >= NEVER:
            break
        chosen, start, wake[rank] = choose(
            job, needs, head[rank], sibling, now, free[rank], room, urgency, period, patience, ran, sent, arrival, first
        )
        if chosen < 0:
            continue
        if start > now:
            wake[rank] = start
            continue
        if now + work[rank] - job.origin[rank] >= cutoff:
            return NEVER, order[:count]
        node = nodes[chosen]
        op = chosen * microbatches + ran[chosen]
        end = now + node.seconds
        if node.full < NEVER and apart[chosen] + (margin[chosen] if forwards[rank] else 0.0) > free[rank]:
            arrival[op + microbatches] = GONE
            order[count], order[count + 1] = op + total, op + microbatches + total
            count += 1
            end = now + node.whole
            free[rank] -= nodes[chosen + 1].takes
            left[rank] -= 1
        else:
            order[count] = op
        count, length = count + 1, max(length, end - job.origin[rank])
        busy[rank], work[rank] = end, work[rank] - (end - now)
        free[rank] -= node.takes
        left[rank] -= 1
        forwards[rank] -= 1 if chosen % 3 == 0 else 0
        wake[rank] = end if left[rank] else NEVER
        for user in (node.fed, chosen + 1 if chosen % 3 == 1 else -1):
            at = user * microbatches + ran[chosen]
            if user >= 0:
                sent[user] += 1
            if user >= 0 and arrival[at] != GONE:
                arrival[at] = end + nodes[user].lag
                receiver = nodes[user].rank
                wake[receiver] = min(wake[receiver], max(arrival[at] - patience, busy[receiver]))
        ran[chosen] += 1
        if nodes[chosen - chosen % 3 + 1].full < NEVER:
            skip_gone(job, chosen - chosen % 3 + 2, ran, arrival)
    return (length if count == total else NEVER), order[:count]


def loads(job: Job) -> tuple[Ints, Ints, Ints, Ints, Floats]:
    """First node of each rank, next node of its rank by node (-1: none), and each rank's ops, F and seconds."""
    nodes = job.nodes
    head, latest, sibling = fill(job.ranks, -1), fill(job.ranks, -1), fill(len(nodes), -1)
    left, forwards, work = fill(job.ranks, 0), fill(job.ranks, 0), fill(job.ranks, 0.0)
    for number in range(len(nodes)):
        node = nodes[number]
        rank = node.rank
        if head[rank] < 0:
            head[rank] = number
        else:
            sibling[latest[rank]] = number
        latest[rank] = number
        left[rank] += job.microbatches
        forwards[rank] += job.microbatches if number % 3 == 0 else 0
        # The shortest possible: all backwards may be full ones.
        merged = number % 3 == 1 and node.full < NEVER
        saved = node.seconds + nodes[number + 1].seconds - node.whole if merged else 0.0
        work[rank] += job.microbatches * (node.seconds - saved)
    return head, sibling, left, forwards, work


def earliest(times: Floats) -> tuple[int, float]:
    least = 0
    for each in range(1, len(times)):
        if times[each] < times[least]:
            least = each
    return least, times[least]


def rooms(job: Job, needs: Floats) -> tuple[Floats, Floats]:
    """Free memory for each node in list scheduling, with I apart from its W; and with B."""
    apart, room = fill(len(needs), 0.0), fill(len(needs), 0.0)
    for number in range(len(needs)):
        node = job.nodes[number]
        apart[number] = max(needs[number], node.takes + node.reserve)
        room[number] = min(apart[number], node.full)
    return apart, room


def skip_gone(job: Job, node: int, ran: list[int], arrival: Floats) -> None:
    """Count the next W of this node that belong to B as run."""
    while ran[node] < job.microbatches and arrival[node * job.microbatches + ran[node]] == GONE:
        ran[node] += 1


def choose(
    job: Job,
    needs: Floats,
    head: int,
    sibling: Ints,
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
    """The most urgent node from `head` on (-1: none), the arrival of its input, and when to look again for others."""
    chosen, least, start, wake = -1, NEVER, 0.0, NEVER
    reserve = left_free(job, head, sibling, ran)
    following = head
    while following >= 0:
        node, following = following, sibling[following]
        microbatch = ran[node]
        if microbatch >= sent[node]:
            continue
        # An F may take the last room if another microbatch can continue without it.
        if room[node] > free and (node % 3 or max(needs[node], job.nodes[node].takes + reserve) > free):
            continue
        arrived = arrival[node * job.microbatches + microbatch]
        urgent = urgency[node] + period * microbatch
        wait = NEVER if first and microbatch == 0 and node % 3 == 1 else patience
        if arrived - wait > now:
            wake = min(wake, arrived - wait)
        elif urgent < least:
            chosen, least, start = node, urgent, arrived
    return chosen, start, wake


def left_free(job: Job, head: int, sibling: Ints, ran: Ints) -> float:
    """Memory to keep free on a rank so that one of its microbatches, before any I, can continue."""
    least, node = NEVER, head
    while node >= 0:
        if node % 3 == 0 and ran[node] > ran[node + 1]:
            least = min(least, job.nodes[node].ahead)
        node = sibling[node]
    return least


class Linked:
    """An op in a mutable order, and in the chain of its rank's ops. No constructor, for speed."""

    __slots__ = ("after", "before", "gone", "held", "needs", "position", "seconds", "takes")
    position: int
    gone: int
    """1 for a W that belongs to a B; its place in the order has no meaning."""
    before: int
    after: int
    seconds: float
    takes: float
    needs: float
    held: float
    """Its rank's memory from its start on."""


def blank_ops(count: int) -> list[Linked]:
    return [Linked() for _ in range(count)]


class Lists(NamedTuple):
    """An order for annealing, mutable: ops by position, by op, and each rank's first and last op."""

    order: Ints
    ops: list[Linked]
    first: Ints
    last: Ints


class Move(NamedTuple):
    """A change of the order, with the data to undo it, and the range whose times it may change."""

    kind: int
    """`NONE`, `SHIFTED`, `MERGED` or `PARTED`."""
    op: int
    """The moved op, or the I that was merged with its W or split from it."""
    anchor: int
    """The previous op on its rank before the move (of the W for a merge or split); -1 for none."""
    position: int
    """Its position before the move."""
    left: int
    right: int
    """First and last position that changed."""
    early: int
    """First position whose time to the end may change."""
    late: int
    """Last position that must be timed again."""


NONE, SHIFTED, MERGED, PARTED = 0, 1, 2, 3


def anneal(job: Job, start: Ints, target: float, heat: float, work: int, seed: int) -> tuple[float, Ints, int]:
    """Move ops of the critical path along their rank. Keep orders that are shorter, or not much longer.

    Where B saves memory, also merge I with its W, and split them again. `start` is a sound order within the limits. A
    move may lose `heat` seconds at the start; that falls to zero. Stops at `target` seconds, or after
    timing `work` ops. Returns the best length and order, and the work done.
    """
    total = len(start)
    lists = link(job, start)
    order = lists.order
    end, backup, tail = fill(total, 0.0), fill(total, 0.0), fill(total, 0.0)
    lag, path = fill(total, 0.0), fill(total, 0)
    for op in range(total):
        lag[op] = job.nodes[op // job.microbatches].lag
    replay(job, lists, end, backup, tail, 0, total - 1, total - 1, NEVER)
    look_ahead(job, lists, tail, 0, total - 1)
    length = measure(job, lists.last, end)
    steps = critical_ops(job, lists, end, lag, path)
    best, best_codes = length, start.copy()
    done = 0
    while done < work and best > target:
        done += 10
        move, seed = pick_move(job, lists, path, steps, seed)
        if move.kind == NONE:
            continue
        seed = seed * 48271 % 2147483647
        allowed = length - heat * (1.0 - done / work) * math.log(seed / 2147483647.0)
        until, good = replay(job, lists, end, backup, tail, move.left, move.right, move.late, allowed)
        done += until - move.left
        if good and measure(job, lists.last, end) <= allowed:
            length = measure(job, lists.last, end)
            steps = critical_ops(job, lists, end, lag, path)
            done += steps + look_ahead(job, lists, tail, move.early, move.right)
            if length < best * (1 - 1e-9):
                best, best_codes = length, fold(job, lists)
        else:
            for position in range(move.left, until):
                end[order[position]] = backup[position]
            undo(job, lists, move)
    return best, best_codes, done


def pick_move(job: Job, lists: Lists, path: Ints, steps: int, seed: int) -> tuple[Move, int]:
    """Move one of the first `steps` ops of `path`, or merge or split it if B helps. Also returns the next seed."""
    seed = seed * 48271 % 2147483647
    op = path[seed % steps]
    seed = seed * 48271 % 2147483647
    share = seed / 2147483647.0
    jump = 1 + int(30 * share * share * share)  # mostly near; chosen by hand
    seed = seed * 48271 % 2147483647
    if job.merges and seed // 2 % 4 == 0:
        return flip(job, lists, op), seed
    move = go(job, lists, op, seed % 2 == 0, jump)
    if move.kind == NONE and job.merges:
        move = make_room(job, lists, op, jump)
    return move, seed


def unfold(job: Job, codes: Ints) -> tuple[Ints, list[Linked]]:
    """The ops of an order, and the records of all ops."""
    total, nodes, microbatches = len(codes), job.nodes, job.microbatches
    order, ops = codes.copy(), blank_ops(total)
    for number in range(len(nodes)):
        node = nodes[number]
        for each in range(number * microbatches, (number + 1) * microbatches):
            op = ops[each]
            op.gone, op.seconds, op.takes, op.needs = 0, node.seconds, node.takes, node.needs
    for position in range(total if job.merges else 0):
        if codes[position] < total:
            continue
        order[position] = codes[position] - total
        op, number = ops[order[position]], order[position] // microbatches
        if number % 3 == 2:
            op.gone = 1
        else:
            node = nodes[number]
            op.seconds, op.takes, op.needs = node.whole, node.takes + nodes[number + 1].takes, node.full
    return order, ops


def fold(job: Job, lists: Lists) -> Ints:
    codes, ops, microbatches = lists.order.copy(), lists.ops, job.microbatches
    for position in range(len(codes) if job.merges else 0):
        op = codes[position]
        if ops[op].gone or (op // microbatches % 3 == 1 and ops[op + microbatches].gone):
            codes[position] = op + len(codes)
    return codes


def link(job: Job, codes: Ints) -> Lists:
    order, ops = unfold(job, codes)
    first, last = fill(job.ranks, -1), fill(job.ranks, -1)
    for position in range(len(order)):
        number = order[position]
        op = ops[number]
        op.position, op.before, op.after = position, -1, -1
        if op.gone:
            continue
        rank = job.nodes[number // job.microbatches].rank
        previous = op.before = last[rank]
        op.held = op.takes
        if previous < 0:
            first[rank] = number
        else:
            ops[previous].after = number
            op.held += ops[previous].held
        last[rank] = number
    return Lists(order, ops, first, last)


def go(job: Job, lists: Lists, op: int, delays: bool, jump: int) -> Move:
    """Move the op past others of its rank, by at most `jump`."""
    ops = lists.ops
    other = reach_later(job, lists, op, jump) if delays else reach_earlier(job, lists, op, jump)
    if other == op:
        return Move(NONE, op, 0, 0, 0, 0, 0, 0)
    position, anchor, target = ops[op].position, ops[op].before, ops[other].position
    follower = ops[other].after if delays else ops[op].after
    left, right = min(position, target), max(position, target)
    shift(job, lists, op, other if delays else ops[other].before, target)
    leader = anchor if delays else ops[op].before
    early = ops[leader].position if leader >= 0 else left
    late = ops[follower].position if follower >= 0 else right
    return Move(SHIFTED, op, anchor, position, left, right, early, late)


def flip(job: Job, lists: Lists, op: int) -> Move:
    """Merge an I and its W to a B, or split it with the W right after the I. The op may be either."""
    ops = lists.ops
    number = op // job.microbatches
    if number % 3 == 2:
        op, number = op - job.microbatches, number - 1
    node = job.nodes[number]
    if number % 3 == 0 or node.full >= NEVER:
        return Move(NONE, op, 0, 0, 0, 0, 0, 0)
    weight, before = op + job.microbatches, ops[op].before
    least, limit = ops[before].held if before >= 0 else 0.0, job.limit[node.rank]
    anchor, position = ops[weight].before, ops[weight].position
    if not ops[weight].gone:
        kind, follower = MERGED, ops[weight].after
        if least + node.full > limit:
            return Move(NONE, op, 0, 0, 0, 0, 0, 0)
        merge(job, lists, op)
    else:
        kind, follower = PARTED, ops[op].after
        if least + max(node.needs, node.takes + job.nodes[number + 1].needs) > limit:
            return Move(NONE, op, 0, 0, 0, 0, 0, 0)
        part(job, lists, op, op, ops[op].position + 1 if position > ops[op].position else ops[op].position)
    # The I changes its duration, which also affects its neighbours.
    early = ops[op].position
    if ops[op].before >= 0:
        early = min(early, ops[ops[op].before].position)
    if node.feeder >= 0:
        early = min(early, ops[op + (node.feeder - number) * job.microbatches].position)
    late = ops[follower].position if follower >= 0 else ops[weight].position
    return Move(kind, op, anchor, position, ops[op].position, ops[weight].position, early, late)


def make_room(job: Job, lists: Lists, op: int, jump: int) -> Move:
    """Merge the nearest I before this op, at most `jump` away, whose W comes after it."""
    ops = lists.ops
    other = op
    for _ in range(jump):
        other = ops[other].before
        if other < 0:
            break
        if job.nodes[other // job.microbatches].full < NEVER:
            weight = ops[other + job.microbatches]
            if not weight.gone and weight.position > ops[op].position:
                return flip(job, lists, other)
    return Move(NONE, op, 0, 0, 0, 0, 0, 0)


def undo(job: Job, lists: Lists, move: Move) -> None:
    if move.kind == SHIFTED:
        shift(job, lists, move.op, move.anchor, move.position)
    elif move.kind == MERGED:
        part(job, lists, move.op, move.anchor, move.position)
    else:
        merge(job, lists, move.op)
        put(lists, move.op + job.microbatches, move.position)


def reach_later(job: Job, lists: Lists, op: int, jump: int) -> int:
    """Farthest op on the same rank, at most `jump` away, after which `op` can go; `op` if none."""
    ops, microbatches = lists.ops, job.microbatches
    number = op // microbatches
    node = job.nodes[number]
    takes, needs, limit = ops[op].takes, ops[op].needs, job.limit[node.rank]
    farthest = op
    barrier = len(ops)
    if node.fed >= 0:
        barrier = ops[op + (node.fed - number) * microbatches].position
    if number % 3 == 1 and not ops[op + microbatches].gone:
        barrier = min(barrier, ops[op + microbatches].position)
    passed = ops[op]
    for _ in range(jump):
        least = passed.held - takes
        other = passed.after
        if other < 0:
            break
        passed = ops[other]
        if passed.position >= barrier or other // microbatches == number or least + passed.needs > limit:
            break
        if passed.held - takes + needs <= limit:
            farthest = other
    return farthest


def reach_earlier(job: Job, lists: Lists, op: int, jump: int) -> int:
    """Farthest op on the same rank, at most `jump` away, before which `op` can go; `op` if none."""
    ops, microbatches = lists.ops, job.microbatches
    number = op // microbatches
    node = job.nodes[number]
    takes, needs, limit = ops[op].takes, ops[op].needs, job.limit[node.rank]
    farthest = op
    barrier = -1
    if node.feeder >= 0:
        barrier = ops[op + (node.feeder - number) * microbatches].position
    other = ops[op].before
    for _ in range(jump):
        if other < 0:
            break
        passed = ops[other]
        least = ops[passed.before].held if passed.before >= 0 else 0.0
        if passed.position <= barrier or other // microbatches == number or least + takes + passed.needs > limit:
            break
        if least + needs <= limit:
            farthest = other
        other = passed.before
    return farthest


def shift(job: Job, lists: Lists, op: int, anchor: int, position: int) -> None:
    """Move `op` to `position` of the order, which is right after `anchor` (-1: nothing) on its rank."""
    moved, rank = lists.ops[op], job.nodes[op // job.microbatches].rank
    delays = position > moved.position
    put(lists, op, position)
    # The memory changes for all ops between the old and the new place.
    start, until = (moved.after, anchor) if delays else (op, moved.after)
    take_out(lists, op, rank)
    put_in(lists, op, anchor, rank)
    weigh(lists, start, moved.after if delays else until)


def merge(job: Job, lists: Lists, op: int) -> None:
    """Merge this I and its W to a B. The W keeps its place in the order."""
    number, weight = op // job.microbatches, op + job.microbatches
    node, merged = job.nodes[number], lists.ops[op]
    follower = lists.ops[weight].after
    take_out(lists, weight, node.rank)
    lists.ops[weight].gone = 1
    merged.seconds, merged.takes, merged.needs = node.whole, node.takes + job.nodes[number + 1].takes, node.full
    weigh(lists, op, follower)


def part(job: Job, lists: Lists, op: int, anchor: int, position: int) -> None:
    """Split a B: its W goes to `position` of the order, which is right after `anchor` on its rank."""
    number, weight = op // job.microbatches, op + job.microbatches
    put(lists, weight, position)
    put_in(lists, weight, anchor, job.nodes[number].rank)
    lists.ops[weight].gone = 0
    for each in range(2):
        node, parted = job.nodes[number + each], lists.ops[op + each * job.microbatches]
        parted.seconds, parted.takes, parted.needs = node.seconds, node.takes, node.needs
    weigh(lists, op, lists.ops[weight].after)


def put(lists: Lists, op: int, position: int) -> None:
    order, ops = lists.order, lists.ops
    start = ops[op].position
    step = 1 if position > start else -1
    for at in range(start, position, step):
        order[at] = order[at + step]
        ops[order[at]].position = at
    order[position] = op
    ops[op].position = position


def take_out(lists: Lists, op: int, rank: int) -> None:
    before, after = lists.ops[op].before, lists.ops[op].after
    if before >= 0:
        lists.ops[before].after = after
    else:
        lists.first[rank] = after
    if after >= 0:
        lists.ops[after].before = before
    else:
        lists.last[rank] = before


def put_in(lists: Lists, op: int, anchor: int, rank: int) -> None:
    ops = lists.ops
    follower = ops[anchor].after if anchor >= 0 else lists.first[rank]
    ops[op].before, ops[op].after = anchor, follower
    if anchor >= 0:
        ops[anchor].after = op
    else:
        lists.first[rank] = op
    if follower >= 0:
        ops[follower].before = op
    else:
        lists.last[rank] = op


def weigh(lists: Lists, start: int, stop: int) -> None:
    """Update the memory of the rank between `start` and `stop`."""
    ops, each = lists.ops, start
    while each != stop:
        op = ops[each]
        op.held = op.takes + (ops[op.before].held if op.before >= 0 else 0.0)
        each = op.after


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
    stops after `horizon` where no end changes any more. Returns the last position that it timed, and False if the
    length is sure to exceed `allowed`.
    """
    order, ops, nodes, microbatches = lists.order, lists.ops, job.nodes, job.microbatches
    position = begin
    while position < len(order) and position <= horizon:
        number = order[position]
        op = ops[number]
        if op.gone:
            backup[position] = end[number]
            position += 1
            continue
        node = nodes[number // microbatches]
        base = number % microbatches
        before, feeder = op.before, node.feeder
        start = end[before] if before >= 0 else job.origin[node.rank]
        if feeder >= 0:
            start = max(start, end[base + feeder * microbatches] + node.lag)
        stop = start + op.seconds
        backup[position] = end[number]
        position += 1
        if stop != end[number]:
            end[number] = stop
            if position > right + 1 and stop + tail[number] > allowed:
                return position, False
            if op.after >= 0:
                horizon = max(horizon, ops[op.after].position)
            if node.fed >= 0:
                horizon = max(horizon, ops[base + node.fed * microbatches].position)
    return position, True


def look_ahead(job: Job, lists: Lists, tail: list[float], left: int, right: int) -> int:
    """Update the least time from the end of each op to the end of all, after a change between `left` and `right`.
    Returns the number of ops that it visited."""
    order, ops, nodes, microbatches = lists.order, lists.ops, job.nodes, job.microbatches
    horizon = left
    position = right
    while position >= 0 and position >= horizon:
        number = order[position]
        op = ops[number]
        position -= 1
        if op.gone:
            continue
        node = nodes[number // microbatches]
        base = number % microbatches
        after, user, longest = op.after, node.fed, -job.origin[node.rank]
        if after >= 0:
            longest = max(longest, ops[after].seconds + tail[after])
        if user >= 0:
            result = base + user * microbatches
            longest = max(longest, nodes[user].lag + ops[result].seconds + tail[result])
        if longest != tail[number]:
            tail[number] = longest
            if op.before >= 0:
                horizon = min(horizon, ops[op.before].position)
            if node.feeder >= 0:
                horizon = min(horizon, ops[base + node.feeder * microbatches].position)
    return right - position


def justify(job: Job, mirrored: Job, order: Ints) -> tuple[float, Ints]:
    """Move all ops as late as possible, beginning at the end, and then all as early as possible. Known as
    forward-backward improvement in project scheduling with limited resources. `mirrored` is the job in reversed time.
    Returns a length that is not greater, and the ops in the order of their starts."""
    _, late = squeeze(mirrored, mirror(order, job.microbatches))
    return squeeze(job, mirror(late, job.microbatches))


def mirror(order: Ints, microbatches: int) -> Ints:
    """The order in reversed time, in which the last microbatch is the first one."""
    total = len(order)
    mirrored = fill(total, 0)
    for position in range(total):
        op = order[position]
        mirrored[total - 1 - position] = op + microbatches - 1 - 2 * (op % microbatches)
    return mirrored


def squeeze(job: Job, order: Ints) -> tuple[float, Ints]:
    """Run each op in turn as soon as possible, also before placed ops of its rank. Returns the same as `justify`."""
    total, nodes, microbatches = len(order), job.nodes, job.microbatches
    numbers, ops = unfold(job, order)
    begin, end = fill(total, 0.0), fill(total, 0.0)
    lists = Lists(numbers, ops, fill(job.ranks, -1), fill(job.ranks, -1))
    length = 0.0
    for position in range(total):
        number = numbers[position]
        op = ops[number]
        op.position = position
        if op.gone:
            continue
        node = nodes[number // microbatches]
        base = number % microbatches
        ready = job.origin[node.rank]
        if node.feeder >= 0:
            ready = max(ready, end[base + node.feeder * microbatches] + node.lag)
        if node.after >= 0:
            ready = max(ready, end[base + node.after * microbatches])
        behind = earliest_gap(job, lists, number, ready, begin, end)
        begin[number] = max(ready, end[behind]) if behind >= 0 else ready
        end[number] = begin[number] + op.seconds
        length = max(length, end[number] - job.origin[node.rank])
        op.held = op.takes + (ops[behind].held if behind >= 0 else 0.0)
        put_in(lists, number, behind, node.rank)
        following = op.after
        while following >= 0:
            ops[following].held += op.takes
            following = ops[following].after
    sort_by_start(job, lists, begin, end)
    return length, fold(job, lists)


def earliest_gap(job: Job, lists: Lists, number: int, ready: float, begin: Floats, end: Floats) -> int:
    """Placed op of its rank after which this op can start the earliest; -1 to be the first. Microbatches stay in order,
    so a stage sends them in the order in which the next one receives them."""
    ops, op, node = lists.ops, lists.ops[number], number // job.microbatches
    rank = job.nodes[node].rank
    limit = job.limit[rank]
    best = follower = lists.last[rank]
    while follower >= 0 and begin[follower] >= ready + op.seconds and follower // job.microbatches != node:
        previous = ops[follower].before
        least = ops[previous].held if previous >= 0 else 0.0
        if least + op.takes + ops[follower].needs > limit:
            break
        start = max(ready, end[previous]) if previous >= 0 else ready
        fits = least + op.needs <= limit
        # It only moves if it gains time. Otherwise an op of no time could pass its dependency.
        if fits and start < begin[follower] and start + op.seconds <= begin[follower]:
            best = previous
        follower = previous
    return best


def sort_by_start(job: Job, lists: Lists, begin: Floats, end: Floats) -> None:
    """Sort the ops of all ranks by start, then end, then previous order. W that are part of a B follow their I."""
    order, ops = lists.order, lists.ops
    heads = lists.first.copy()
    position = 0
    while position < len(order):
        chosen, least = -1, (NEVER, NEVER, 0)
        for op in heads:
            if op >= 0:
                found = (begin[op], end[op], ops[op].position)
                if found < least:
                    chosen, least = op, found
        order[position] = chosen
        position += 1
        node = chosen // job.microbatches
        heads[job.nodes[node].rank] = ops[chosen].after
        if node % 3 == 1 and ops[chosen + job.microbatches].gone:
            order[position] = chosen + job.microbatches
            position += 1


def measure(job: Job, last: Ints, end: Floats) -> float:
    longest = 0.0
    for rank in range(job.ranks):
        longest = max(longest, end[last[rank]] - job.origin[rank])
    return longest


def critical_ops(job: Job, lists: Lists, end: Floats, lag: Floats, path: Ints) -> int:
    """Write a chain of ops to `path`, each waiting for the next, from the one that ends last. Returns its length."""
    ops, last, microbatches = lists.ops, lists.last, job.microbatches
    worst, length = 0, measure(job, last, end)
    while end[last[worst]] - job.origin[worst] < length:
        worst += 1
    steps, op = 0, last[worst]
    while op >= 0:
        path[steps] = op
        steps += 1
        feeder = job.nodes[op // microbatches].feeder
        source = op % microbatches + feeder * microbatches if feeder >= 0 else -1
        previous = ops[op].before
        if previous < 0 or (source >= 0 and end[source] + lag[op] > end[previous]):
            previous = source
        op = previous
    return steps
