"""A step of torch's executor that begins before the verdict on whether it counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch.distributed.pipelining.schedules import _Action, _wait_batch_p2p

from zbpipe.runtime._torch.fsdp2 import free_all
from zbpipe.runtime._torch.pipelining import OwnRuntime, actions_of
from zbpipe.runtime._torch.position import Row
from zbpipe.simulator.post_validation import RunAhead


class _StepIsVoidError(Exception):
    """The actions that ran ahead do not count."""


def run_ahead(runtime: OwnRuntime, cut: RunAhead, verdict: Callable[[], bool], run: Callable[[], None]) -> bool:
    """Run a step whose first actions run ahead of `verdict`; returns whether the step counts.

    If not, all pending messages have arrived and the stages are reset to before the step. Only changes of buffers and
    random states by forwards remain. `run` runs torch's executor on the cut lists.
    """
    lists, rank = runtime.pipeline_order_with_comms, runtime.rank
    before, after, drain = (actions_of(rows[rank]) for rows in (cut.before, cut.after, cut.drain))

    def walk() -> Iterator[_Action]:
        yield from before
        if verdict():
            yield from after
            return
        yield from drain
        # The executor's loop does not expect an error from its list, so it neither logs it nor reports a failure.
        raise _StepIsVoidError

    runtime.pipeline_order_with_comms = {**lists, rank: Row([*before, *after], walk)}
    try:
        run()
    except _StepIsVoidError:
        _forget_step(runtime)
        return False
    finally:
        runtime.pipeline_order_with_comms = lists
    return True


def _forget_step(runtime: OwnRuntime) -> None:
    for received in runtime.fwd_recv_ops.values():
        _wait_batch_p2p(received)  # type: ignore[no-untyped-call, unused-ignore]
    runtime.fwd_recv_ops.clear()
    for work in runtime.works:
        stage = work.stage
        work.gathering = runtime.unshard_ops.pop(stage.stage_index, ())
        work.finish_gathering()
        free_all(stage.submod)  # FSDP's gathered weights belong to the step that does not count
        runtime.unsharded_stages.discard(stage.stage_index)
        stage.clear_runtime_states()
        for left in (stage.bwd_cache, stage.backward_state, stage.dw_runner):
            left.clear()
        work.messages.release_receives()
