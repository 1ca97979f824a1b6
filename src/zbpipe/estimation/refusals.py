"""Numbers of microbatches that torch's own schedules refuse."""

from __future__ import annotations

from zbpipe.schedule.registry import Algorithm

_IN_ROUNDS = ("Interleaved1F1B", "InterleavedZeroBubble")
_AT_LEAST_STAGES = ("1F1B", "DualPipeV")


def require_torch_runs(algorithm: Algorithm, ranks: int, stages_per_rank: int, microbatches: int) -> None:
    """Refuse what the class of torch refuses that runs this schedule, with a ValueError."""
    if algorithm.source != "torch":
        return
    rounds, stages = max(1, microbatches // ranks), ranks * stages_per_rank
    if algorithm.name in _IN_ROUNDS and microbatches % rounds:
        raise ValueError(f"torch refuses {microbatches} microbatches on {ranks} ranks: no multiple of {rounds} rounds")
    if algorithm.name in _AT_LEAST_STAGES and microbatches < stages:
        raise ValueError(f"torch refuses {microbatches} microbatches for {stages} stages: it needs at least as many")
