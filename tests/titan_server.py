"""Imports TorchTitan once, and forks the ranks of each job that it reads; an answer has their exit codes."""

import gc
import importlib
import json
import logging
import os
import pickle
import signal
import sys
import time
import traceback
from functools import cache
from pathlib import Path
from typing import Any

from forks import compile_in_turn, torchrun_variables
from searching import searching_little

from zbpipe.cli.demo.launch import demo_arguments

PATIENCE = 10.0
"""Seconds that the other ranks have when one has failed: enough to fail by themselves, in the same way."""


def import_titan() -> None:
    from zbpipe.frameworks.titan import cpu

    cpu.stand_in()
    import torch._inductor.compile_fx  # noqa: F401
    from torch.distributed.pipelining import schedules

    import zbpipe.titan.train  # noqa: F401
    from zbpipe.frameworks import installation
    from zbpipe.frameworks.titan import plug, versions

    models = "models02" if versions.find_installed().name.startswith("0.2") else "models03"
    importlib.import_module(f"zbpipe.cli.demo.{models}")
    # To parse a command line it imports more, and reads the options' comments from the sources.
    plug.ConfigManager().parse_args(demo_arguments(Path(), "llama3_python_stdlib"))  # type: ignore[attr-defined]
    # In a rank, a look at the names of all modules copies the memory that it shares: a fifth of a second.
    found = list(installation._places(schedules.get_schedule_class))
    installation._places = lambda function: iter(found)
    # After the last step TorchTitan's rank 0 waits two seconds for the users of its store. Here it is not its own.
    sys.modules[plug.Trainer.__module__].time = _WithoutSleep()  # type: ignore[attr-defined]


@cache
def prepare_compiler() -> None:
    """What each rank's first compilation would do: tables of Dynamo, hashes of torch's sources, tests of the CPU."""
    import torch
    from torch._inductor.fx_passes import joint_graph

    joint_graph.lazy_init()
    with torch.no_grad():  # autograd's engine starts threads, and then no rank could use it
        layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.SiLU())
        torch.compile(layers, fullgraph=True)(torch.ones(8, 8))
    torch._dynamo.reset()
    gc.collect()
    gc.freeze()


class _WithoutSleep:
    def __getattr__(self, name: str) -> Any:
        return (lambda seconds: None) if name == "sleep" else getattr(time, name)


def run(job: dict[str, Any]) -> list[int]:
    if "--compile.enable" in job["arguments"]:
        prepare_compiler()
    if job["module"]:
        importlib.import_module(job["module"])
    ranks = [_fork(job, rank) for rank in range(job["num_ranks"])]
    codes: dict[int, int] = {}
    deadline = float("inf")
    while len(codes) < len(ranks):
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            codes[pid] = os.waitstatus_to_exitcode(status)
            if codes[pid] != 0:
                deadline = min(deadline, time.monotonic() + PATIENCE)
        elif time.monotonic() > deadline:
            for left in set(ranks) - codes.keys():
                os.kill(left, signal.SIGKILL)
            deadline = float("inf")
        else:
            time.sleep(0.02)
    return [codes[pid] for pid in ranks]


def _fork(job: dict[str, Any], rank: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        (_call if job["module"] else _train)(job, rank)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _train(job: dict[str, Any], rank: int) -> None:
    """What torchrun does for a rank, and then `python -m zbpipe.titan.train`."""
    import torch._functorch.config

    from zbpipe.titan import train

    folder = _redirect(job)
    errors = folder / "errors" / str(rank)
    errors.mkdir(parents=True)
    os.environ |= torchrun_variables(rank, job["num_ranks"], job["port"])
    os.environ["TORCHELASTIC_ERROR_FILE"] = str(errors / "error.json")
    for name, value in job["functorch"].items():
        setattr(torch._functorch.config, name, value)
    compile_in_turn()
    sys.argv = ["zbpipe.titan.train", *job["arguments"]]
    with searching_little():  # Auto plans for seconds otherwise
        train.main()


def _redirect(job: dict[str, Any]) -> Path:
    log = os.open(Path(job["folder"], "output.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    return Path(job["folder"])


def _call(job: dict[str, Any], rank: int) -> None:
    """A function where zbpipe is plugged into TorchTitan; what it returns is in the job's folder."""
    from zbpipe.frameworks.options import Options
    from zbpipe.frameworks.titan import plug

    folder = _redirect(job)
    plug.plug_in(Options(), on_cpu=True)
    logging.disable(logging.WARNING)
    function, arguments = pickle.loads(bytes.fromhex(job["arguments"]))
    (folder / "result").write_bytes(pickle.dumps(function(*arguments)))


def main() -> None:
    gc.disable()  # it takes a fifth of the time of the imports, and TorchTitan's ranks disable it, too
    import_titan()
    gc.freeze()  # else each rank's first collections look at all of it, and copy the memory that it shares
    sys.path[:] = json.loads(sys.argv[1])
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
