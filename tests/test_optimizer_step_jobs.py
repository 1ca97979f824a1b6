"""OptimizerStep in jobs as users write them: FSDP2, checkpointing, the compiler, plans, Auto, resuming, failures."""

import os
import signal
from collections.abc import Callable, Iterator
from copy import deepcopy
from itertools import chain
from math import inf
from pathlib import Path
from typing import Any

import pipelines
import pytest
import torch
import torch.distributed as dist
from models import Checkpointing, batch, build_stage
from pipelines import Pipeline
from ranks import endings, run_ranks
from searching import searching_little
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import LBFGS, SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.lr_scheduler import ReduceLROnPlateau as Plateau

import zbpipe
from zbpipe.runtime.optimizer.norm import clip
from zbpipe.runtime.optimizer.step import StepCounts

MICROBATCHES, STEPS = 4, 6
LIMIT, LIMIT_OF_REPLICAS, LIMIT_OF_WAVES = 0.6, 0.88, 0.64
"""About half of the steps exceed them. A job with replicas has larger batches, and a wave has more stages."""
EXCEEDED = 1e-3
"""All steps exceed it."""
Weights = dict[str, Tensor]


class Job(Pipeline):
    """Stages of a small model with a schedule and an optimizer, on each of some ranks."""

    def __init__(
        self,
        name: str = "ZBV",
        checkpointing: Checkpointing = "none",
        compiled: bool = False,
        parallel: Callable[[nn.Module, DeviceMesh], None] | None = None,
        mesh: DeviceMesh | None = None,
        seed: int = 0,
        *,
        microbatches: int = MICROBATCHES,
        make_part: Callable[[int, int], nn.Module] | None = None,
        optimize: Callable[[list[nn.Parameter]], Optimizer] = lambda parameters: AdamW(parameters, lr=1e-2),
        **options: Any,
    ) -> None:
        def build(index: int, num_stages: int) -> nn.Module:
            module = build_stage(index, num_stages, checkpointing, seed)
            if parallel and mesh:
                parallel(module, mesh)
            for layer in module.children() if compiled else ():
                if not isinstance(layer, nn.Embedding):  # torch 2.13 refuses to compile one alone
                    layer.compile(fullgraph=True, backend="aot_eager")
            return module

        self.group = mesh.get_group("pp") if mesh else None
        has_replicas = mesh is not None and mesh.mesh_dim_names != ("pp", "tp")
        self.replica, self.replicas = (mesh.get_local_rank(1), mesh.size(1)) if mesh and has_replicas else (0, 1)
        super().__init__(name, microbatches, make_part or build, group=self.group, **options)
        self.trained = [each for each in self.parameters() if each.requires_grad]
        self.optimizer = optimize(self.trained)
        self.norms: list[float] = []
        """Of ordinary steps."""

    def train(self, step: Callable[[], Any], steps: range = range(STEPS)) -> list[str]:
        """The losses."""
        losses = []
        for number in steps:
            tokens, targets = (
                each.chunk(self.replicas)[self.replica] for each in batch(self.replicas * MICROBATCHES, number)
            )
            losses.append(str(self.run(tokens, target=targets)))
            step()
        return losses

    def ordinary(
        self, max_norm: float, lr_schedulers: LRScheduler | None = None, on_nonfinite: str = "propagate"
    ) -> Callable[[], None]:
        """The step of a job without zbpipe's."""

        def step() -> None:
            norm = clip(self.trained, max_norm, self.group, torch.device("cpu"))
            self.norms.append(float(norm))
            if on_nonfinite == "propagate" or norm.isfinite():
                self.optimizer.step()
                if lr_schedulers is not None:
                    lr_schedulers.step()
            self.optimizer.zero_grad()

        return step

    def ahead(self, max_norm: float, **options: Any) -> Any:
        return zbpipe.OptimizerStep(self.schedule, self.optimizer, max_norm=max_norm, **options)

    def weights(self) -> Weights:
        """And the optimizer's state."""
        found = {f"{i}.{k}": value for i, module in self.modules.items() for k, value in module.state_dict().items()}
        for number, parameter in enumerate(self.trained):
            found |= {f"{number}.{name}": value for name, value in self.optimizer.state[parameter].items()}
        return {
            name: torch.as_tensor(each.to_local() if isinstance(each, DTensor) else each).detach().clone()
            for name, each in found.items()
            if each is not None
        }


def same_as_ordinary(limit: float = LIMIT, **job: Any) -> StepCounts:
    """Trains both ways."""
    usual, ahead = Job(**job), Job(**job)
    usual_losses = usual.train(usual.ordinary(limit))
    step = ahead.ahead(limit, predict=False)
    losses = ahead.train(step)
    step.finish()
    assert losses == usual_losses
    expected, found = usual.weights(), ahead.weights()
    assert expected.keys() == found.keys()
    for name, weight in expected.items():
        assert torch.equal(weight, found[name]), name
    return step.counts  # type: ignore[no-any-return]


def shard(module: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy = MixedPrecisionPolicy()) -> None:  # noqa: B008
    names = tuple(name for name in mesh.mesh_dim_names or () if name != "pp")
    for part in (*module.children(), module):
        pipelines.shard(part, mesh[names], mp_policy=policy, reshard_after_forward=False)
        part.set_gradient_divide_factor(1.0)  # type: ignore[operator]


def shard_mixed(module: nn.Module, mesh: DeviceMesh) -> None:
    shard(module, mesh, MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


def in_tensor_parallel(module: nn.Module, mesh: DeviceMesh) -> None:
    styles = {"up": ColwiseParallel(), "gate": ColwiseParallel(), "down": RowwiseParallel()}
    for block in module.children():
        if hasattr(block, "gate"):
            parallelize_module(block, mesh["tp"], styles)


def on_four_ranks() -> list[StepCounts]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    hybrid = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("pp", "dp_replicate", "dp_shard"))
    return [
        same_as_ordinary(LIMIT_OF_REPLICAS, parallel=shard_mixed, mesh=mesh),
        same_as_ordinary(LIMIT_OF_REPLICAS, parallel=shard, mesh=hybrid),
        same_as_ordinary(
            parallel=in_tensor_parallel, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
        ),
    ]


@pytest.mark.long
def test_fsdp_hsdp_and_tensor_parallelism() -> None:
    by_rank = run_ranks(4, on_four_ranks)
    assert all(found == by_rank[0] for found in by_rank)
    for counts in by_rank[0]:
        assert counts.repeated > 0
        assert counts.validated > 0


def with_checkpointing_and_compiler(table: str) -> list[StepCounts]:
    return [
        same_as_ordinary(checkpointing="selective"),
        same_as_ordinary(checkpointing="full", compiled=True),
        same_as_ordinary(LIMIT_OF_WAVES, name=table),
    ]


@pytest.mark.long
def test_checkpointing_compiler_and_tables(tmp_path: Path) -> None:
    table = tmp_path / "wave.csv"
    found = zbpipe.plan(2, MICROBATCHES, (1, 1.2, 0.8), placements=["wave"], objective="period", budget=2e5)
    table.write_text(found.schedule.to_csv())
    for counts in chain(*run_ranks(2, with_checkpointing_and_compiler, str(table))):
        assert counts.repeated > 0
        assert counts.validated > 0


def with_auto() -> StepCounts:
    usual, job = Job("ZBV"), Job("Auto", profile_steps=1)
    losses = usual.train(usual.ordinary(LIMIT), range(14))
    step = job.ahead(LIMIT, predict=False)
    with searching_little():
        found = job.train(step, range(14))
    step.finish()
    assert [round(sum(eval(each)), 4) for each in found] == [round(sum(eval(each)), 4) for each in losses]
    return step.counts


def saved_and_resumed() -> None:
    """Around a step that is repeated."""
    usual, job = Job(), Job()
    expected = usual.train(usual.ordinary(EXCEEDED))
    step = job.ahead(EXCEEDED, predict=False)
    losses = job.train(step, range(3))
    assert step.is_pending
    step.finish()
    states = {index: deepcopy(module.state_dict()) for index, module in job.modules.items()}
    optimizer = deepcopy(job.optimizer.state_dict())
    resumed = Job(seed=1)
    for index, module in resumed.modules.items():
        module.load_state_dict(states[index])
    resumed.optimizer.load_state_dict(optimizer)
    again = resumed.ahead(EXCEEDED, predict=False)
    losses += resumed.train(again, range(3, STEPS))
    again.finish()
    assert losses == expected
    for name, weight in usual.weights().items():
        assert torch.equal(weight, resumed.weights()[name]), name


def evaluated_while_pending() -> None:
    usual, job = Job(), Job()
    usual.train(usual.ordinary(EXCEEDED), range(3))
    step = job.ahead(EXCEEDED, predict=False)
    job.train(step, range(3))
    assert step.is_pending
    tokens, targets = batch(MICROBATCHES, 50)
    outputs = [
        each.schedule.eval(*([tokens] if each.has_first else []), target=targets if each.has_last else None)
        for each in (usual, job)
    ]
    assert not step.is_pending
    assert outputs[0] is None or torch.equal(*outputs)


def logged_steps_wait() -> None:
    usual, job = Job(), Job()
    usual.train(usual.ordinary(1e6), range(3))
    step = job.ahead(1e6)
    norms: list[float | None] = []
    job.train(lambda: norms.append(step(now=len(norms) == 2)))
    assert [norm is None for norm in norms] == [True, True, False, True, True, True]
    assert norms[2] == pytest.approx(usual.norms[2], rel=1e-6)
    assert step.is_pending
    step.finish()
    assert step.counts == StepCounts(synchronous=2, validated=4)


def changed_while_pending() -> None:
    """Learning rates and groups may change, weights may not. One rank has a parameter that no optimizer steps."""
    usual, job = Job(), Job()
    if usual.has_first:
        for each in (usual, job):
            each.optimizer.param_groups[0]["params"].pop()
            each.trained.pop()
    step, ordinary = job.ahead(EXCEEDED, predict=False), usual.ordinary(EXCEEDED)
    for number in range(4):
        for each in (usual, job):
            each.optimizer.param_groups[0]["lr"] = 1e-2 / (1 + number)
            if number == 2:
                each.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
        losses = [each.train(how, range(number, number + 1)) for each, how in ((usual, ordinary), (job, step))]
        assert losses[0] == losses[1]
    assert step.counts.repeated > 0
    with torch.no_grad():
        job.trained[0].add_(1)
    with pytest.raises(ValueError, match=r"changed before its last optimizer step was validated.* finish\(\)"):
        job.train(step)


def raises_on_all_ranks() -> str:
    job = Job()
    step = job.ahead(1e6, on_nonfinite="raise", predict=False)
    with pytest.raises(zbpipe.PipelineError) as error:
        job.train(lambda: (poison(job), step()))
    assert isinstance(error.value.__cause__, FloatingPointError)
    return str(error.value)


def poison(job: Job) -> None:
    if dist.get_rank() == 1:
        job.trained[0].grad[:] = inf  # type: ignore[index]


def all_at_once() -> tuple[StepCounts, str]:
    saved_and_resumed()
    evaluated_while_pending()
    logged_steps_wait()
    changed_while_pending()
    refuse_all()
    return with_auto(), raises_on_all_ranks()


def test_what_jobs_do_around_steps_that_are_pending() -> None:
    """They save, evaluate, log, change the model, swap schedules under Auto, are refused, and raise."""
    per_rank = run_ranks(2, all_at_once)
    for counts, words in per_rank:
        assert counts.synchronous + counts.validated + counts.repeated == 14
        assert "the norm of the gradients is inf in optimizer step 1: lower the learning rate" in words


def killed_before_its_vote() -> None:
    job = Job()
    step = job.ahead(1e6, predict=False)
    job.train(lambda: (end_suddenly(bool(job.optimizer.state)), step()))


def killed_when_it_should_drain() -> None:
    """Rank 0 has sent it what it does not receive any more, and rank 2 waits for its clipping."""
    job = Job("ZBH2")
    step = job.ahead(1e-6, predict=False)  # all steps clip
    verdict = step.verdict
    step.verdict = lambda: (verdict(), end_suddenly())[0]
    job.train(step)


def end_suddenly(now: bool = True) -> None:
    if now and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(("ranks", "job"), [(2, killed_before_its_vote), (3, killed_when_it_should_drain)])
def test_a_rank_killed_while_others_wait_for_it(ranks: int, job: Callable[[], None]) -> None:
    first, second, *others = endings(ranks, job, group_timeout=20)
    assert second.exit_code == -signal.SIGKILL
    for survivor in (first, *others):
        assert "PipelineError" in (survivor.error or "")


def different_calls() -> None:
    job = Job()
    step = job.ahead(2.0 if dist.get_rank() else 1e6, predict=False)
    job.train(step)


def test_ranks_with_different_arguments() -> None:
    for ending in endings(2, different_calls, group_timeout=20):
        assert "the ranks do not validate the same optimizer step" in (ending.error or "")


def refusals() -> Iterator[tuple[str, Callable[[], Any]]]:
    zbv, one = Job(), Job("ZBH1")
    adam, embedding = zbv.optimizer, nn.Embedding(4, 4, sparse=True)
    yield (
        "ZBH1 gains nothing (0.0% of a step) from an optimizer step that no rank waits for: use ZBV, ZBH2 or ZB2P with"
        " twice as many microbatches as ranks, or clip",
        lambda: zbpipe.OptimizerStep(one.schedule, one.optimizer),
    )
    yield "takes a schedule of zbpipe's", lambda: zbpipe.OptimizerStep(zbv.modules, adam)  # type: ignore[arg-type]
    yield (
        "takes optimizers of torch.optim, for example [optimizer], got []",
        lambda: zbpipe.OptimizerStep(zbv.schedule, []),
    )
    yield "cannot step LBFGS", lambda: zbpipe.OptimizerStep(zbv.schedule, LBFGS(zbv.trained))
    yield "cannot step <torch.optim.lr_scheduler.ReduceLROnPlateau", lambda: zbv.ahead(1.0, lr_schedulers=Plateau(adam))
    yield "max_norm has to be a number above 0", lambda: zbv.ahead(0.0)
    yield "max_norm=None is not a limit: give a number above 0, or math.inf", lambda: zbv.ahead(None)  # type: ignore[arg-type]
    yield (
        "on_nonfinite='ignore' is unknown: use one of 'propagate', 'skip', 'raise'",
        lambda: zbv.ahead(1.0, on_nonfinite="ignore"),
    )
    sparse = zbpipe.OptimizerStep(zbv.schedule, SGD(embedding.parameters(), lr=1))
    embedding(torch.tensor([1])).sum().backward()
    yield "has a sparse gradient", sparse
    yield "ZBV already has an OptimizerStep", lambda: zbv.ahead(1.0)


def refuse_all() -> None:
    for words, act in refusals():
        with pytest.raises((TypeError, ValueError)) as error:
            act()
        assert words in str(error.value), str(error.value)
