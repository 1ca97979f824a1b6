"""What goes wrong in a long run: it ends soon, on every rank, by an error that says where it began."""

import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import StageOfKnownShapes
from models import batch, loss_fn
from pipelines import Pipeline, as_rank
from ranks import endings, join_group, run_ranks
from torch import nn
from twin import Twin

import zbpipe
from zbpipe.runtime._torch import pipelining, position
from zbpipe.runtime.ranks import failures, progress

MICROBATCHES = 6
SHORT_TIMEOUT = 6.0
"""Seconds. On a busy machine a rank reaches its next message only after two or three."""


class Job(Pipeline):
    """A pipeline of `MICROBATCHES`."""

    def __init__(self, schedule: Any = "ZBV", loss: Callable[..., torch.Tensor] = loss_fn, **options: Any) -> None:
        super().__init__(schedule, MICROBATCHES, loss=loss, **options)

    def step(self) -> None:
        tokens, targets = batch(MICROBATCHES)
        self.run(tokens, target=targets)


class OnCall:
    """Does something at its nth call."""

    def __init__(self, nth: int, action: Callable[[], None]) -> None:
        self.left, self.action = nth, action

    def __call__(self, *args: Any) -> None:
        self.left -= 1
        if self.left == 0:
            self.action()


def end_suddenly() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def explode(*args: Any) -> Any:
    raise ArithmeticError("too much")


def fail(job: Job, action: Callable[[], Any], stage: int) -> None:
    """In the second step, in the third F of `stage`."""
    job.step()
    if stage in job.modules:
        job.modules[stage].register_forward_pre_hook(OnCall(3, action))
    job.step()


def fail_in_the_second_step(action: Callable[[], None], **options: Any) -> None:
    """On rank 1 of three."""
    fail(Job(**options), action, 4)


PLACE = r"action \d+ of \d+ in step \d+"


def at(rank: str, peer: str) -> str:
    """Where `rank` was when it could not reach `peer`: at a computation that waited for a message, or at a message."""
    op = r"(\d[FI]\d, waiting for \d[FI]\d from|\d(RECV|SEND|WAIT_SEND)_[FB]\d (from|to))"
    return rf"rank {rank}, schedule ZBV, {PLACE}, {op} rank {peer}: RuntimeError: "


LOST = rf"{at('[02]', '1')}.*by peer"


def test_a_rank_killed_in_the_middle_of_a_step() -> None:
    first, killed, last = endings(3, fail_in_the_second_step, end_suddenly, group_timeout=60)
    assert killed.exit_code == -signal.SIGKILL
    for ending in (first, last):
        assert ending.exit_code == 0, ending
        assert re.search(rf"PipelineError: (another rank failed first: )?{LOST}", ending.error or ""), ending.error


def killed_between_steps() -> None:
    """Where its trainer waits for the other ranks."""
    job = Job()
    job.step()
    with failures.share_with_other_ranks():
        dist.barrier()
        if dist.get_rank() == 1:
            end_suddenly()
        dist.all_reduce(torch.ones(1))


def test_a_rank_killed_between_two_steps() -> None:
    first, killed, *others = endings(4, killed_between_steps, group_timeout=60)
    assert killed.exit_code == -signal.SIGKILL
    for ending in (first, *others):
        assert ending.exit_code == 0, ending
        words = r"PipelineError: no answer from rank 1: killed, or stuck \(seen by rank \d: .* by peer"
        assert re.search(words, ending.error or ""), ending.error


def in_loss() -> None:
    explodes = OnCall(5, explode)

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        explodes()
        return loss_fn(output, target)

    Job(loss=loss).step()


def too_slow() -> None:
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()  # joining the group is subject to its timeout, too
    group = dist.new_group(timeout=timedelta(seconds=SHORT_TIMEOUT))
    try:
        fail_in_the_second_step(lambda: store.wait(["rank 0 gave up", "rank 2 gave up"]), group=group)
    finally:
        store.set(f"rank {dist.get_rank()} gave up", "")


def other_receives() -> None:
    Job(receives="late" if dist.get_rank() == 1 else "early").step()


FAULTS = {each.__name__: each for each in (in_loss, too_slow, other_receives)}
"""Ops of any kind fail in the interleavings."""


def all_faults(folder: Path) -> dict[str, str]:
    told: list[str] = []
    logging.getLogger(progress.__name__).addFilter(lambda record: told.append(record.getMessage()) or True)
    errors = raised_by(FAULTS, folder)
    return errors | {"log": "; ".join(each for each in told if each.startswith("nothing has moved"))}


def raised_by(cases: Mapping[str, Callable[[], None]], folder: Path) -> dict[str, str]:
    """What this rank raises in each of these, in a process group of its own, which they may leave broken."""
    errors = {}
    for name, case in cases.items():
        renew_group(folder / name)
        try:
            case()
        except (Exception, KeyboardInterrupt) as error:
            errors[name] = f"{type(error).__name__}: {error}"
    renew_group(folder / "end")
    return errors


def renew_group(meeting_point: Path) -> None:
    """Leave what may be broken."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    join_group(meeting_point, rank, num_ranks, timeout=60)


def test_faults_are_told_by_every_rank(tmp_path: Path) -> None:
    per_rank = run_ranks(3, all_faults, tmp_path)

    def assert_told(name: str, *patterns: str) -> None:
        """The error of each rank."""
        for errors, pattern in zip(per_rank, patterns, strict=True):
            assert re.match(f"PipelineError: {pattern}", errors[name]), errors[name]

    here = rf"rank 0, schedule ZBV, {PLACE}, 5F\d: ArithmeticError: too much"
    first = f"another rank failed first: {here}$"
    assert_told("in_loss", here + "$", first, first)
    timed_out = rf"(another rank failed first: )?rank \d, schedule ZBV, {PLACE}, .* from rank 1: .*Timed out"
    assert_told("too_slow", timed_out, timed_out, timed_out)

    # The slow rank is in an op, the others wait for its messages; each says so once, before its time is up.
    still = r"nothing has moved for \d seconds, and the process group gives up after 6: rank {} is at {}, "
    for rank, op in enumerate((r"\S+, waiting for \S+ from rank 1", "4F2", r"\S+, waiting for \S+ from rank 1")):
        assert re.fullmatch(still.format(rank, PLACE) + op, per_rank[rank]["log"]), per_rank[rank]["log"]
    table = r"ZBV with 6 microbatches \(table \w{8}\)"
    assert_told("other_receives", *3 * [f"the ranks have different schedules: ranks 0, 2: {table}; rank 1: {table}$"])


def test_what_a_device_ran() -> None:
    device = Twin(0, is_stuck=True)
    launched = progress.Launched(device.new_event)
    assert launched.describe() == ""
    for microbatch in range(3):
        assert launched.around("F", 2, microbatch, lambda: "result") == "result"
    assert launched.describe() == "on the device the last op is not known, 2F0 has not ended, nor have 2 after it"
    device.pass_event()
    device.pass_event()
    assert launched.describe() == "on the device 2F1 ran last, 2F2 has not ended"
    device.pass_event()
    assert launched.describe() == "the device has run everything that was launched, 2F2 last"
    for microbatch in range(3, 2 * progress.MOST):
        launched.around("F", 2, microbatch, lambda: None)
    assert device.made == progress.MOST
    assert launched.describe().startswith(f"on the device the last op is not known, 2F{progress.MOST} has not ended")
    while len(device.ahead) > 1:
        device.pass_event()
    last = 2 * progress.MOST - 1
    assert launched.count_ended() == last
    assert launched.describe() == f"on the device 2F{last - 1} ran last, 2F{last} has not ended"


def test_a_device_that_is_stuck_after_its_step_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """Its host waits in the training loop."""
    device, x = Twin(0, is_stuck=True), torch.zeros(1, 8, requires_grad=True)
    with (
        as_rank(1, 2),
        mock.patch.object(progress, "_launched_on", return_value=progress.Launched(device.new_event)),
        mock.patch.object(progress, "_watch"),
        mock.patch.object(pipelining, "timeout_of", return_value=100),
    ):
        stage = StageOfKnownShapes(nn.Linear(8, 8), 1, 2, torch.device("cpu"), input_args=x, output_args=x)
        schedule: Any = zbpipe.build_pipeline_schedule("ZBH1", [stage], 2, nn.functional.mse_loss)
        schedule.step(target=torch.zeros(2, 8))
        followed = schedule._failures
        device.pass_event()
        for seconds in range(90):
            followed.look(schedule, seconds)
        (record,) = caplog.records
        assert "nothing has moved for 71 seconds" in record.getMessage()
        assert "rank 1 is at the end of its step, on the device 1F0 ran last, 1F0 has not ended" in record.getMessage()
        while len(device.ahead) > 1:
            device.pass_event()
        for seconds in range(90, 180):
            followed.look(schedule, seconds)
        assert "on the device 1W1 ran last, the rest of the step has not ended" in caplog.records[1].getMessage()
        device.pass_event()
        for seconds in range(180, 400):
            followed.look(schedule, seconds)
    assert len(caplog.records) == 2


ENDS_IN_A_CALL = """
import time
from datetime import timedelta
import torch.distributed as dist
from zbpipe.runtime.ranks import progress

store = dist.TCPStore("localhost", 0, is_master=True)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)

class Progress(progress.StepFailures):
    def look(self, schedule, now):
        own = store.clone()
        print("calls", flush=True)
        try:
            own.wait(["never"], timedelta(seconds=0.3))
        except RuntimeError:
            return 0.0

followed, schedule = (Progress(None, has_events=False) for _ in range(2))
progress.pipelining.device_of = progress.pipelining.stages_of = lambda of: [None]
followed.start(schedule)
time.sleep(0.1)
"""


@pytest.mark.long
def test_a_job_may_end_while_the_thread_reads_the_store() -> None:
    """Python ends the thread where the call returns, within C++: that aborted the process."""
    ended = subprocess.run([sys.executable, "-c", ENDS_IN_A_CALL], check=False, capture_output=True, text=True)
    assert "calls" in ended.stdout
    assert ended.returncode == 0, ended.stderr


def test_another_thread_can_tell_where_a_step_is(one_rank: None) -> None:
    """A computation that runs waits for no message; after the step nothing is left but the last sends."""
    found: list[str] = []
    job = Job()
    job.step()  # torch runs the stages once before it
    for module in job.modules.values():
        module.register_forward_pre_hook(lambda *_: found.append(position.describe_position(job.schedule)))
    job.step()
    ops = [op for op in zbpipe.generate("ZBV", 1, MICROBATCHES).ops[0] if op.kind is zbpipe.OpKind.F]
    told = [re.fullmatch(r"action (\d+) of (\d+) in step 2, (\dF\d)", place) for place in found]
    steps, totals, names = zip(*(place.groups() for place in told if place), strict=True)
    assert list(names) == list(map(str, ops))
    assert list(map(int, steps)) == sorted(map(int, steps))
    end = f"after action {totals[0]} in step 2, waiting for its last sends"
    assert position.describe_position(job.schedule) == end


def test_no_thread_reads_the_frames_of_another() -> None:
    """On Python 3.11 that ends a process which runs compiled code, now and then."""
    assert not [path for path in Path(zbpipe.__file__).parent.rglob("*.py") if "_current_frames" in path.read_text()]


def on_accelerators(folder: Path) -> None:
    """Rank 0 fails in its second step. The hosts of the others are through with it, and wait for ever."""
    rank = dist.get_rank()
    of_rank_3: Any = dist.new_group([0, 3])
    sys.stderr = (folder / str(rank)).open("w")  # the end of the process shows it
    twin = Twin(rank, is_stuck=rank > 0)
    with (
        mock.patch.object(pipelining, "interrupt"),  # as over NCCL
        mock.patch.object(progress, "_launched_on", return_value=progress.Launched(twin.new_event)),
    ):
        job = Job()
        job.step()
        waits = [
            job.step,
            job.parameters()[0].sum().item,
            lambda: nn.utils.clip_grad_norm_(job.parameters(), 1.0, error_if_nonfinite=True),
            lambda: dist.all_reduce(torch.ones(1), group=of_rank_3),
        ]
        job.modules.get(0, nn.Identity()).register_forward_pre_hook(OnCall(3, explode))
        dist.barrier()
        try:
            with twin.computing():
                waits[rank]()
                print("the wait is over", file=sys.stderr)
        finally:  # over gloo the others would see this rank's end
            while not all(f"Rank {rank} ends" in (folder / str(rank)).read_text() for rank in (1, 2, 3)):
                time.sleep(0.1)


def test_a_host_that_waits_for_its_device_ends_with_the_first_error(tmp_path: Path) -> None:
    """In `item`, in the clip, or in a collective."""
    failed, *others = endings(4, on_accelerators, tmp_path, group_timeout=120, timeout=100)
    here = rf"rank 0, schedule ZBV, {PLACE}, 0F2, .*device.*: ArithmeticError: too much"
    assert re.search(f"PipelineError: {here}", failed.error or ""), failed
    for rank, other in enumerate(others, 1):
        assert other.exit_code == 1
        told = (tmp_path / str(rank)).read_text()
        assert re.search(f"PipelineError: another rank failed first: {here}", told)
        assert "the wait is over" not in told


class GoneStore:
    """Answers nothing for a minute, or that its connection is broken."""

    def __init__(self, is_silent: bool) -> None:
        self.is_silent = is_silent

    def check(self, *args: Any) -> Any:
        if not self.is_silent:
            raise dist.DistNetworkError("Broken pipe")
        time.sleep(60)

    compare_set = check


@pytest.mark.parametrize("store", [GoneStore(True), GoneStore(False), None])
def test_a_store_that_is_gone_with_its_host(monkeypatch: pytest.MonkeyPatch, store: Any) -> None:
    monkeypatch.setattr(pipelining, "default_store", lambda: store)
    monkeypatch.setattr(failures, "PATIENCE", 0.2)
    with pytest.raises(ArithmeticError), failures.share_with_other_ranks():
        explode()
