"""Run a function on several real ranks: one process each, a gloo group between them, a time limit on all.

Importing torch takes a process three seconds, more than most of these jobs. So all ranks are forked from one process
that has imported it and done nothing else.
"""

from __future__ import annotations

import datetime
import gc
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist

CONTEXT = multiprocessing.get_context("forkserver")
"""Forks processes from one that has imported torch."""


def fork_from(*modules: str) -> None:
    """Import these, too, into the process that ranks are forked from; before the first rank is."""
    # Inductor, too: every compiler of torch's imports most of it, which takes a second.
    imported = ["torch.distributed.pipelining", "torch._inductor.compile_fx", "zbpipe.runtime.build", "pytest"]
    CONTEXT.set_forkserver_preload(["without_garbage", *imported, *modules])


fork_from()


def start_server() -> None:
    """Start the process that ranks are forked from, unless it runs."""
    folders = [str(Path(__file__).parent), *filter(None, [os.getenv("PYTHONPATH")])]
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(folders)):
        forkserver.ensure_running()


class RankError(AssertionError):
    """A rank raised; the message is its traceback."""


class Ending(NamedTuple):
    exit_code: int | None
    """None: it went on until the time was up."""
    value: Any
    """What the function returned; None if it did not."""
    error: str | None
    """The traceback, if it raised."""


def run_ranks(
    num_ranks: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 300,
    backend: str = "gloo",
    method: str = "forkserver",
) -> list[Any]:
    """`function(*args)` on every rank of a group; what each returned, by rank.

    `function` has to be importable. All processes are gone when this returns or raises, also after `timeout` seconds.
    `backend` may be one of benchmarks/fifo.py. With the `method` "spawn" each process imports torch anew.
    """
    with _started(num_ranks, function, args, timeout, backend, method) as (ends, _):
        return _collect(ends, timeout)


def endings(
    num_ranks: int, function: Callable[..., Any], *args: Any, group_timeout: float, timeout: float = 300
) -> list[Ending]:
    """The same for ranks that fail: how each of them ended within `timeout` seconds."""
    with _started(num_ranks, function, args, group_timeout) as (ends, processes):
        deadline = time.monotonic() + timeout
        answers = [_answer(end, deadline) for end in ends]
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = [process.exitcode for process in processes]
    return [
        Ending(code, None if failed else value, value if failed else None)
        for code, (failed, value) in zip(codes, answers, strict=True)
    ]


def _answer(end: Connection, deadline: float) -> tuple[bool, Any]:
    try:
        return pickle.loads(end.recv_bytes()) if end.poll(max(0.0, deadline - time.monotonic())) else (False, None)
    except EOFError:
        return False, None


@contextmanager
def _started(
    num_ranks: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    group_timeout: float,
    backend: str = "gloo",
    method: str = "forkserver",
) -> Iterator[tuple[list[Connection], list[BaseProcess]]]:
    """The ranks, and for each the end of a pipe that brings its answer. Leaving ends them all."""
    context: Any = multiprocessing.get_context(method)
    if context is CONTEXT:
        start_server()
    with tempfile.TemporaryDirectory() as directory:
        # A file as the meeting point needs no port.
        ends: list[Connection] = []
        processes: list[BaseProcess] = []
        for rank in range(num_ranks):
            ours, theirs = context.Pipe(duplex=False)
            join = partial(join_group, f"{directory}/rendezvous", rank, num_ranks, group_timeout, backend)
            call = (theirs, join, dict(os.environ), function, args)
            process = context.Process(target=_main, args=call, daemon=True)
            process.start()
            theirs.close()
            ends.append(ours)
            processes.append(process)
        try:
            yield ends, processes
        finally:
            for process in processes:
                process.join(timeout=5)
                if process.is_alive():
                    process.kill()
                    process.join()


def _collect(ends: list[Connection], timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout
    while len(results) < len(ends):
        open_ends = [end for rank, end in enumerate(ends) if rank not in results]
        ready = wait(open_ends, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            missing = sorted(set(range(len(ends))) - results.keys())
            raise RankError(f"ranks {missing} gave no answer in {timeout} seconds")
        for end in ready:
            rank = ends.index(end)  # type: ignore[arg-type]
            try:
                failed, value = pickle.loads(end.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                raise RankError(f"rank {rank} died") from None
            if failed:
                raise RankError(f"rank {rank}:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(ends))]


def join_group(meeting_point: Path | str, rank: int, num_ranks: int, timeout: float, backend: str = "gloo") -> None:
    """Meet the other ranks, by a file that no other group has used."""
    if backend.startswith("fifo"):
        import fifo  # noqa: F401  # registers it
    dist.init_process_group(
        backend,
        init_method=f"file://{meeting_point}",
        rank=rank,
        world_size=num_ranks,
        timeout=datetime.timedelta(seconds=timeout),
    )
    dist.barrier()  # who leaves a group while another rank still joins it breaks the other's connections


def _main(
    end: Connection,
    join: Callable[[], None],
    environment: dict[str, str],
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    gc.freeze()  # else this rank's collections look at all of torch's objects, and copy the memory that ranks share
    os.environ.clear()  # it was that of the test that came first
    os.environ.update({"GLOO_SOCKET_IFNAME": "lo"} | environment)
    torch.set_num_threads(1)
    try:
        join()
        value = function(*args)
        with suppress(RuntimeError):  # a failed step closes the connections
            dist.barrier()
        answer = (False, value)
    except BaseException:
        answer = (True, traceback.format_exc())
    finally:
        # Plain pickle: torch's own would share the tensors with a process that is about to end.
        end.send_bytes(pickle.dumps(answer))
        end.close()
        if dist.is_initialized():
            dist.destroy_process_group()
