"""A schedule of your own: a function that lists what each rank runs, registered under a name.

    torchrun --nproc-per-node 2 examples/own_schedule.py

docs/adding-a-schedule.md has the rules, and how an installed package brings a schedule with it.
"""

import torch.distributed as dist
from plain_loop import MICROBATCHES, STEPS, build_stages, join_job, loss_fn, train

import zbpipe
from zbpipe import CostModel, Op, OpKind, Placement, Schedule


@zbpipe.register("LateW", summary="1F1B's order of F and I; rank r runs W r microbatches late")
def late_w(ranks: int, microbatches: int) -> Schedule:
    """The later a rank starts, the more W it keeps for the end of the step, where it would wait for dI."""
    rows = []
    for rank in range(ranks):
        ahead = min(ranks - rank, microbatches)
        row = [Op(rank, OpKind.F, m) for m in range(ahead)]
        for m in range(microbatches):
            row.append(Op(rank, OpKind.I, m))
            if m + ahead < microbatches:
                row.append(Op(rank, OpKind.F, m + ahead))
            if m >= rank:
                row.append(Op(rank, OpKind.W, m - rank))
        row += [Op(rank, OpKind.W, m) for m in range(max(microbatches - rank, 0), microbatches)]
        rows.append(tuple(row))
    return Schedule("LateW", Placement.loop(ranks), microbatches, tuple(rows))


def compare(ranks: int) -> None:
    """What it promises, simulated with T_F = T_I = T_W = 1, next to two that zbpipe knows."""
    for name in ("1F1B", "ZBH1", "LateW"):
        schedule = zbpipe.generate(name, ranks, MICROBATCHES)
        assert zbpipe.validate(schedule) == []
        timeline = zbpipe.simulate(schedule, CostModel.uniform(schedule.placement))
        print(f"{name:6} step {timeline.makespan:g}, peak activations {max(timeline.peak_activations):g}")


if __name__ == "__main__":
    stages = build_stages("LateW", join_job())
    if dist.get_rank() == 0:
        compare(dist.get_world_size())
    schedule = zbpipe.build_pipeline_schedule("LateW", stages, MICROBATCHES, loss_fn)
    train(schedule, stages, range(STEPS))
    dist.destroy_process_group()
