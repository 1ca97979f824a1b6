"""Measure a job while it trains, plan a schedule for it, and train on with the plan: what `Auto` does by itself.

    torchrun --nproc-per-node 2 examples/measure_and_plan.py

Leaves costs.toml (what was measured) and plan.csv (the schedule) in the current folder. The next job can start with
plan.csv as its schedule, and `zbpipe plan --costs-file costs.toml -m 8` plans again, for example with --memory-limit.
"""

from pathlib import Path

import torch.distributed as dist
from plain_loop import MICROBATCHES, STEPS, build_stages, join_job, loss_fn, train

import zbpipe
from zbpipe.costs import JobCosts, dump_costs

PROFILED = 5
"""Steps: one warms up, one measures memory, three measure times."""


def plan(costs: JobCosts) -> None:
    """Write plan.csv. The stages stay where they are: the costs hold their placement."""
    found = zbpipe.plan(dist.get_world_size(), MICROBATCHES, costs)
    usual = zbpipe.simulate(zbpipe.generate("ZBV", dist.get_world_size(), MICROBATCHES), costs)
    print(f"planned {found.makespan * 1e3:.1f} ms a step, with ZBV {usual.makespan * 1e3:.1f} ms (simulated)")
    dump_costs(costs, "costs.toml")
    Path("plan.csv").write_text(found.schedule.to_csv())


def main() -> None:
    stages = build_stages("ZBV", join_job())
    schedule = zbpipe.build_pipeline_schedule("ZBV", stages, MICROBATCHES, loss_fn)
    profiler = zbpipe.Profiler(schedule, steps=3)
    train(schedule, stages, range(PROFILED))
    assert profiler.costs is not None, "two steps more than were to be timed"
    if dist.get_rank() == 0:
        plan(profiler.costs)
    dist.barrier()  # plan.csv is there, in a folder that all ranks see
    schedule = zbpipe.build_pipeline_schedule("plan.csv", stages, MICROBATCHES, loss_fn)
    train(schedule, stages, range(PROFILED, STEPS))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
