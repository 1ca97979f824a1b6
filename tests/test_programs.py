"""Random autograd Functions and layers (`programs`): ZBH1 gives the gradients of plain autograd, or a named error.

`python tests/test_programs.py --count 20000 --seed 1` runs more of them, and counts what came of them.
"""

import argparse
import logging
import random
import re
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import DECLARATION, LENGTH, PRELUDE, Program, choices, write
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

import zbpipe
from zbpipe.runtime.split import FROM_BACKWARD
from zbpipe.runtime.split import stage as split_stage
from zbpipe.runtime.verify.gradient_check import schedule_w_last

MICROBATCHES, STEPS, ROWS, WIDTH = 4, 3, 3, 4
TOLERANCE = {"float64": 1e-9, "float32": 4e-2}
"""Relative to a gradient's norm. In float32 the products are in bfloat16, and sums over microbatches may cancel."""

OF_TORCH = ("activation checkpoint has been mutated", "has been modified by an inplace operation")
"""Errors of torch, which notices there that a backward wrote into what another needs."""

Gradients = list[dict[str, Tensor | None]]
"""By step."""


MODES = ("undeclared", "declared", "plain")
"""Whether layers declare their Functions; plain programs have none."""
RIGHT = frozenset({"in W", "in I and W", "in I", "void", "aliased"})


class Outcome(NamedTuple):
    kind: str
    """Where right programs have their weight gradients, or what became of the others."""
    reason: str = ""


def batch(step: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The microbatches differ in the signs of their sums, and in the first number, by which programs choose."""
    generator = torch.Generator().manual_seed(step)
    x, target = (torch.randn(MICROBATCHES * ROWS, WIDTH, generator=generator, dtype=dtype) for _ in range(2))
    x[:, 0] = torch.arange(len(x)) / (ROWS + step)
    return x, target


def build(code: Any, dtype: torch.dtype) -> dict[str, Any]:
    """The names of a program, and its `stage`: nothing is shared with another run."""
    names: dict[str, Any] = {"FROM_BACKWARD": FROM_BACKWARD}
    exec(code, names)
    torch.default_generator.manual_seed(0)
    names["stage"] = names["Stage"]().to(dtype)
    return names


def note(stage: nn.Module) -> dict[str, Tensor | None]:
    found = {name: None if each.grad is None else each.grad.clone() for name, each in stage.named_parameters()}
    return found | {f"weight {name}": each.detach().clone() for name, each in stage.named_parameters()}


def run_plainly(code: Any, dtype: torch.dtype, *, clones: bool = False) -> Gradients:
    """Without a pipeline; with `clones`, backwards return copies."""
    names = build(code, dtype)
    stage, found = names["stage"], []
    for each in names.values() if clones else ():
        if isinstance(each, type) and issubclass(each, torch.autograd.Function):
            each.backward = staticmethod(_cloning(each.backward))
    for step in range(STEPS):
        for x, target in zip(*(each.chunk(MICROBATCHES) for each in batch(step, dtype)), strict=True):
            F.mse_loss(stage(x), target).backward()
        found.append(note(stage))
        names["between"](stage, step)
    return found


def _cloning(backward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        returned = backward(*args)
        many = returned if isinstance(returned, tuple) else (returned,)
        return tuple(each.clone() if isinstance(each, Tensor) else each for each in many)

    return run


def run_split(code: Any, dtype: torch.dtype, schedule: str) -> Iterator[tuple[dict[str, Tensor | None], float]]:
    """The same by a schedule, and the share of the weight gradients that W computes."""
    names = build(code, dtype)
    module = names["stage"]
    like = torch.zeros(ROWS, WIDTH, dtype=dtype)
    stage = PipelineStage(module, 0, 1, torch.device("cpu"), input_args=(like,), output_args=(like,))
    # The W of all microbatches after all I, when much can have changed.
    table = schedule_w_last(1, MICROBATCHES, ["FI", "W"]) if schedule == "WeightsLast" else schedule
    pipeline = zbpipe.build_pipeline_schedule(table, [stage], MICROBATCHES, F.mse_loss, scale_grads=False)
    for step in range(STEPS):
        x, target = batch(step, dtype)
        pipeline.step(x, target=target)
        work = split_stage.find_weight_work(stage)
        yield note(module), work.share if work is not None and work.flops else 0.0
        names["between"](module, step)


def compare(program: Program, *, is_declared: bool) -> Outcome:
    dtype = getattr(torch, program.dtype)
    plain = compile(program.undeclared, "program", "exec")
    try:
        expected = run_plainly(plain, dtype)
    except Exception as error:  # a program may be wrong in any way
        return Outcome("void", f"{type(error).__name__}: {error}")
    if not all(each is None or each.isfinite().all() for step in expected for each in step.values()):
        return Outcome("void", "not finite")
    if not any(each is not None and each.any() for name, each in expected[0].items() if "weight " not in name):
        return Outcome("void", "no gradients")
    outcome = _compare(program, expected, is_declared=is_declared)
    if outcome.kind == "wrong":
        others = run_plainly(plain, dtype, clones=True)
        if any(
            difference(one[name], other[name], 1e-9)
            for one, other in zip(expected, others, strict=True)
            for name in one
        ):
            return Outcome("aliased", outcome.reason)
    return outcome


def _compare(program: Program, expected: Gradients, *, is_declared: bool) -> Outcome:
    dtype = getattr(torch, program.dtype)
    code = compile(program.source if is_declared else program.undeclared, "program", "exec")
    share = 0.0
    try:
        for step, (found, share) in enumerate(run_split(code, dtype, program.schedule)):  # noqa: B007
            for name, gradient in expected[step].items():
                if wrong := difference(found[name], gradient, TOLERANCE[program.dtype]):
                    return Outcome("wrong", f"step {step}, {name}: {wrong}")
    except Exception as error:
        if is_named(error):
            return Outcome("refused", f"{type(error).__name__}: {error}")
        if any(words in str(error) for words in OF_TORCH):
            return Outcome("torch's error", str(error))
        return Outcome("wrong", "".join(traceback.format_exception(error)))
    return Outcome("in W" if share == 1 else "in I and W" if share else "in I")


def difference(found: Tensor | None, expected: Tensor | None, tolerance: float) -> str:
    """How they differ; empty if they do not."""
    if found is None or expected is None:
        return "" if found is expected else f"{found} instead of {expected}"
    error = float((found - expected).norm() / (expected.norm() + 1e-3))
    return "" if error < tolerance else f"error {error:.2g}"


def is_named(error: BaseException | None) -> bool:
    """Whether zbpipe itself raised the error, or one of its causes, for a reason that it tells."""
    while error is not None:
        frames = traceback.extract_tb(error.__traceback__)
        if (
            isinstance(error, (RuntimeError, ValueError))
            and not isinstance(error, zbpipe.PipelineError)
            and Path(zbpipe.__file__).parent in Path(frames[-1].filename).parents
            and "raise" in str(frames[-1].line)
        ):
            return True
        error = error.__cause__ or error.__context__
    return False


@pytest.fixture(autouse=True)
def _quiet(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("zbpipe.runtime.split.stage"), "disabled", True)
    warnings.simplefilter("ignore")


def run(made_from: bytes, mode: str) -> tuple[Program, Outcome]:
    program = write(made_from, mode == "plain")
    return program, compare(program, is_declared=mode == "declared")


def check(made_from: bytes, mode: str) -> None:
    program, outcome = run(made_from, mode)
    if mode == "declared" and program.is_hidden:  # the page says when such writes are noticed
        return
    allowed = {
        "undeclared": RIGHT | {"torch's error"},
        "declared": RIGHT | {"torch's error", "refused"},
        "plain": {"in W"},
    }
    assert outcome.kind in allowed[mode], f"{outcome}: {mode}, --choices {made_from.hex()}\n{program.source}"


@pytest.mark.parametrize("number", [60, pytest.param(400, marks=pytest.mark.long)])
def test_programs(number: int) -> None:
    settings(max_examples=number)(given(choices, st.sampled_from(MODES))(check))()


def linear(backward: str) -> str:
    """A layer with a Function of its own between others, whose backward this is."""
    return f"""
class F0(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x.mm(w.t())
    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        {backward}
class Layer(nn.Module):
{DECLARATION}{{F0.apply: FROM_BACKWARD}}
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2)
    def forward(self, x):
        return F0.apply(x, self.w)
class Stage(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(WIDTH, WIDTH), Layer(), nn.Tanh(), nn.Linear(WIDTH, WIDTH), Layer())
{BETWEEN}"""


BETWEEN = """
def between(stage, step):
    stage.zero_grad()
"""
VIEW = """
class {name}(torch.autograd.Function):
    __module__ = "somebody.views"
    @staticmethod
    def forward(ctx, w):
        return w.view_as(w)
    @staticmethod
    def backward(ctx, g):
        return g * 0.1
class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2)
    def forward(self, x):
        return F.linear(x, {name}.apply(self.w))
"""
WRITTEN = {
    "a view of others": VIEW.format(name="Scale") + BETWEEN,
    "a view of others, named as torchao's": VIEW.format(name="_UnwrapWeight") + BETWEEN,
    "a hook within what the first stage makes from weights alone": f"""
class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.flat = nn.Parameter(torch.randn(WIDTH * WIDTH) / 2)
    def forward(self, x):
        y = x.mm(self.flat.view(WIDTH, WIDTH))
        y.register_hook(lambda g: 2 * g)
        return y
class Second(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2), nn.Parameter(torch.randn(WIDTH, WIDTH) / 2)
    def forward(self, x):
        return x.mm(self.a + self.b)
class Stage(nn.Sequential):
    def __init__(self):
        super().__init__(First(), Second())
{BETWEEN}""",
    "a weight that is frozen between its use and the backward": f"""
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2)
    def forward(self, x):
        self.w.requires_grad_()
        y = F.linear(x, self.w)
        self.w.requires_grad_(False)
        return y
class Stage(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(WIDTH, WIDTH), Layer())
{BETWEEN}""",
    "addmm_": linear("return dy.mm(w), torch.zeros_like(w).addmm_(dy.t(), x)"),
    "adds to .grad": linear("""if w.grad is None: return dy.mm(w), dy.t().mm(x)
        dx = dy.mm(w); w.grad.addmm_(dy.t(), x); return dx, None"""),
    "dX in place, for some microbatches": linear("""if x[0, 0] > 0.2:
            dw, dx = dy.t().mm(x), torch.zeros_like(x); dx.addmm_(dy, w); return dx, dw
        dx = dy.mm(w); return dx, dy.t().mm(x)"""),
    "masks dY, for some microbatches": linear("dw = dy.t().mm(x); dy[x[:, 0] > 0.5] = 0; return dy.mm(w), dw"),
    "clears a temporary, for some microbatches": linear("""t = x * 2; dw = dy.t().mm(t)
        if x[0, 0] > 0.2: t.zero_()
        return dy.mm(w), dw"""),
    "NumPy": linear("dy.mul_(0.5); dw = dy.t().mm(x); dw.numpy(); return dy.mm(w), dw"),
    "DLPack": linear("dx = dy.mm(w); return torch.from_numpy(numpy.from_dlpack(dx) * 0.5), dy.t().mm(x)"),
}


@pytest.mark.parametrize("source", WRITTEN.values(), ids=list(WRITTEN))
def test_programs_that_people_write(source: str) -> None:
    outcome = compare(Program(PRELUDE + source, "float64", False, False, "WeightsLast"), is_declared=False)
    assert outcome.kind in RIGHT - {"void", "aliased"}, outcome


# Many programs


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare random programs with plain autograd.")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--mode", choices=MODES, default="undeclared")
    parser.add_argument("--choices", help="those of one program, in hexadecimal")
    args = parser.parse_args()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    if args.choices is not None:
        program, outcome = run(bytes.fromhex(args.choices), args.mode)
        print(program.source, outcome, sep="\n")
        return
    counted, reasons = Counter[str](), Counter[str]()
    chooser = random.Random(args.seed)
    for number in range(args.count):
        made_from = chooser.randbytes(LENGTH)
        program, outcome = run(made_from, args.mode)
        counted[outcome.kind + (" (hidden)" if outcome.kind == "wrong" and program.is_hidden else "")] += 1
        if outcome.kind in ("refused", "wrong", "torch's error"):
            last = re.sub(r"[\d.]+|\bF\d", "#", outcome.reason.strip().split("\n")[-1])[:150]
            kind = last if "Error" in last else "None" if "None" in outcome.reason else "other numbers"
            reasons[f"{outcome.kind}: {kind}"] += 1
        if outcome.kind == "wrong":
            print(f"seed {args.seed}, program {number}: --choices {made_from.hex()}\n{outcome.reason}", flush=True)
    for reason, times in reasons.most_common(40):
        print(times, reason)
    print(dict(counted))


if __name__ == "__main__":
    main()
