"""Annealing where times vary: the objective is the synchronous step time of an order over many random samples.

As in `kernel`, on plain numbers, and as machine code where numba is installed. Each move is timed in all samples. The
innermost loops go over the samples of one op, whose numbers are adjacent in memory.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from zbpipe.costs.model import ROUNDING
from zbpipe.planner.kernel import NEVER, NONE, Floats, Ints, Job, Lists, critical_ops, fill, fold, link, pick_move, undo

Rows = list[Floats]


class Samples(NamedTuple):
    """Times of a job's ops in each sample: by op, then by sample. Sample 0 has no jitter."""

    seconds: Rows
    lag: Rows
    """Seconds from the end of an op's dependency to the arrival of its result."""
    deviations: float
    """Number of standard deviations that the objective adds to the mean of all samples but 0."""
    most: float
    """Longest step allowed in sample 0, in seconds."""


def anneal_in_samples(
    job: Job,
    samples: Samples,
    start: Ints,
    end: Rows,
    trial: Rows,
    heat: float,
    work: int,
    seed: int,
) -> tuple[float, Ints]:
    """Move ops of the critical path of one sample after another. Keep orders that are not worse, or not by much.

    Args:
        job: the scheduling problem.
        samples: the times of its ops.
        start: a sound order within the limits, which takes no more than `most` in sample 0.
        end: buffer with one number for each op and sample.
        trial: a second buffer of the same size.
        heat: seconds that one move may lose at the start; it falls to zero.
        work: number of ops to time before it ends; the same op counts in each sample.
        seed: seed of the random numbers, 1 to 2147483646.

    Returns:
        The least value of the objective, and its order.
    """
    total = len(start)
    lists = link(job, start)
    count = len(samples.seconds[0])
    sampled, lag, path, steps = fill(total, 0.0), fill(total, 0.0), fill(total, 0), 0
    retime(job, samples, lists, 0, end, trial)
    copy_from(lists, 0, trial, end)
    length = judge(job, samples, lists, end)
    best, best_codes = length, start.copy()
    done, tries = total * count, 0
    while done < work:
        seed = seed * 48271 % 2147483647
        if tries % _TRIES == 0:
            sample = seed % count
            for op in range(total):
                sampled[op], lag[op] = end[op][sample], samples.lag[op][sample]
            steps = critical_ops(job, lists, sampled, lag, path)
            done += steps
        tries += 1
        move, seed = pick_move(job, lists, path, steps, seed)
        done += 10
        if move.kind == NONE:
            continue
        retime(job, samples, lists, move.left, end, trial)
        done += (total - move.left) * count
        found = judge(job, samples, lists, trial)
        seed = seed * 48271 % 2147483647
        if found > length - heat * (1.0 - done / work) * math.log(seed / 2147483647.0):
            undo(job, lists, move)
            continue
        length, tries = found, 0
        copy_from(lists, move.left, trial, end)
        if length < best * (1 - ROUNDING):
            best, best_codes = length, fold(job, lists)
    return best, best_codes


_TRIES = 8
"""Number of moves on the same critical path, if none is kept. Chosen by hand."""


def retime(job: Job, samples: Samples, lists: Lists, left: int, end: Rows, trial: Rows) -> None:
    """Write the ends of all ops from position `left` of the order on to `trial`. Earlier ends are in `end`."""
    order, ops = lists.order, lists.ops
    microbatches, count = job.microbatches, len(samples.seconds[0])
    for position in range(left, len(order)):
        op = order[position]
        if ops[op].gone:
            continue
        number = op // microbatches
        node = job.nodes[number]
        mine, previous = trial[op], ops[op].before
        if previous < 0:
            for sample in range(count):
                mine[sample] = 0.0
        else:
            ready = trial[previous] if ops[previous].place >= left else end[previous]
            for sample in range(count):
                mine[sample] = ready[sample]
        if node.feeder >= 0:
            source, lag = op + (node.feeder - number) * microbatches, samples.lag[op]
            ready = trial[source] if ops[source].place >= left else end[source]
            for sample in range(count):
                mine[sample] = max(mine[sample], ready[sample] + lag[sample])
        seconds, share = samples.seconds[op], 1.0
        if number % 3 == 1 and ops[op + microbatches].gone:
            # A B varies like its I and its W, of which it saves an overhead.
            apart = node.seconds + job.nodes[number + 1].seconds
            share = node.whole / apart if apart > 0 else 1.0
            weight = samples.seconds[op + microbatches]
            for sample in range(count):
                mine[sample] += share * weight[sample]
        for sample in range(count):
            mine[sample] += share * seconds[sample]


def judge(job: Job, samples: Samples, lists: Lists, end: Rows) -> float:
    """The objective. `NEVER` if sample 0 takes too long."""
    count = len(samples.seconds[0])
    total = squares = 0.0
    for sample in range(count):
        length = 0.0
        for rank in range(job.ranks):
            length = max(length, end[lists.last[rank]][sample])
        if sample:
            total += length
            squares += length * length
        elif length > samples.most:
            return NEVER
    mean = total / (count - 1)
    return mean + samples.deviations * math.sqrt(max(squares / (count - 1) - mean * mean, 0.0))


def copy_from(lists: Lists, left: int, source: Rows, target: Rows) -> None:
    """Copy the ends of all ops from position `left` of the order on."""
    for position in range(left, len(lists.order)):
        ends, row = source[lists.order[position]], target[lists.order[position]]
        for sample in range(len(row)):
            row[sample] = ends[sample]
