"""Ends the processes that a test session leaves behind, also where it was killed.

A session starts this program with its pipe as standard input, which closes when the session ends. All processes that
it starts inherit the variable, whatever starts them: torchrun, the fork server, a browser's driver.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

VARIABLE = "ZBPIPE_TEST_SESSION"
PATIENCE = 2.0
"""Seconds for processes to end by themselves."""


def watch_session() -> None:
    """Start the program for this process, which then must not exec another one."""
    os.environ[VARIABLE] = str(os.getpid())
    ours, _open_until_we_end = os.pipe()
    subprocess.Popen([sys.executable, __file__], stdin=ours, stdout=subprocess.DEVNULL, start_new_session=True)
    os.close(ours)


def find_left(session: str) -> set[int]:
    """The processes of a session but this one; none where there is no /proc."""
    mark = f"{VARIABLE}={session}".encode()
    found = set()
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if mark in environment.read_bytes().split(b"\0"):
                found.add(int(environment.parent.name))
    return found - {os.getpid()}


def main() -> None:
    sys.stdin.read()
    deadline = time.monotonic() + PATIENCE
    while left := find_left(os.environ[VARIABLE]):
        if time.monotonic() > deadline:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


if __name__ == "__main__":
    main()
