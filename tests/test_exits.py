"""Jobs that start and end: each of their processes ends with 0, again and again."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

JOBS, AT_A_TIME, RANKS = 6, 3, 2
"""An end that goes wrong in one job of ten goes wrong here in seven runs of ten."""
PATIENCE = 120.0
SCRIPT = Path(__file__).with_name("short_job.py")


FAILING = """
import atexit, sys
import torch.distributed as dist
backend, peer_is_gone = sys.argv[1:]
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.get_backend_config = lambda group=None: backend
# Stands for what NCCL does when its communicators go: it waits.
atexit.register(lambda: print("orderly end") if peer_is_gone == "no" else __import__("time").sleep(600))
print("begins")
raise ArithmeticError("too much")
"""


@pytest.mark.parametrize("backend", ["cuda:nccl", "cpu:gloo,cuda:nccl", "cpu:gloo,cuda:gloo"])
def test_an_error_over_nccl_ends_the_process_without_its_communicators(tmp_path: Path, backend: str) -> None:
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    over_gloo = "nccl" not in backend
    command = [*(sys.executable, "-m", "zbpipe.run", "--", str(script)), backend, "no" if over_gloo else "yes"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert ended.returncode == 1
    assert ended.stdout.split("\n") == ["begins", *(["orderly end"] if over_gloo else []), ""]
    assert ended.stderr.count("ArithmeticError: too much") == 1
    assert "Traceback" in ended.stderr


def test_every_process_ends_well(tmp_path: Path) -> None:
    """C++ ends a process by "terminate called without an active exception" if threads outlive the interpreter."""
    command = [sys.executable, str(SCRIPT), str(tmp_path), *map(str, (JOBS, AT_A_TIME, RANKS, int(PATIENCE)))]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert json.loads(ended.stdout) == [0] * JOBS * RANKS, ended.stderr
