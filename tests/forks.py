"""Calls in processes that are forked from one that has imported what takes long to import."""

import gc
import io
import multiprocessing
import os
import runpy
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

TIMEOUT = 200


def on_forks(function: Callable[[Any], Any], arguments: Sequence[Any]) -> list[Any]:
    """`function` of each argument, each in a process forked from this one, two at a time."""
    gc.collect()
    gc.disable()  # the forks make many objects and end soon
    signal.alarm(TIMEOUT)  # ends the process, as it does the forks
    with multiprocessing.get_context("fork").Pool(2, signal.alarm, (TIMEOUT,), maxtasksperchild=1) as pool:
        results = pool.map(function, arguments, chunksize=1)
    signal.alarm(0)
    return results


def run_script(folder: Path, num_ranks: int, *command: str) -> str:
    """What all ranks print of the script, or the module, and its arguments; run in `folder` as torchrun would."""
    import ranks
    import torch.distributed as dist

    # As with torchrun, the store is held by none of the ranks.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    jobs = [(folder, rank, num_ranks, store.port, command) for rank in range(num_ranks)]
    ranks.start_server()
    with ranks.CONTEXT.Pool(num_ranks, maxtasksperchild=1) as pool:
        return "".join(pool.starmap_async(_run_rank, jobs, chunksize=1).get(TIMEOUT))


def compile_in_turn() -> None:
    """Ranks compile the same graphs at the same time: here one compiles each, and the others find it in the cache."""
    import torch._dynamo.guards
    from filelock import FileLock  # torch needs it
    from torch._inductor import compile_fx
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    # torch times the guards of each graph, with the processor's caches emptied: an eighth of the compilation.
    torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0
    compile_graph, turn = compile_fx._compile_fx_inner, FileLock(Path(cache_dir(), "turn"))

    def compile_alone(*args: Any, **kwargs: Any) -> Any:
        with turn:
            return compile_graph(*args, **kwargs)

    compile_fx._compile_fx_inner = compile_alone


def torchrun_variables(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """The environment that torchrun gives a rank, with the port of its store."""
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    return {name: str(value) for name, value in (own | store).items()}


def _run_rank(folder: Path, rank: int, num_ranks: int, port: int, command: tuple[str, ...]) -> str:
    import torch

    os.environ |= torchrun_variables(rank, num_ranks, port)
    os.chdir(folder)
    torch.set_num_threads(1)
    script, sys.argv = command[0], list(command)
    with redirect_stdout(io.StringIO()) as printed, redirect_stderr(printed):
        if script.endswith(".py"):
            sys.path.insert(0, str(Path(script).parent))
            runpy.run_path(script, run_name="__main__")
        else:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
    return printed.getvalue()
