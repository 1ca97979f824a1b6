"""A test session that is killed leaves no process behind."""

import os
import subprocess
import sys
import time

from reaper import find_left

# The ranks are children of a fork server, which is none of theirs: they would go on for their time limit.
SESSION = """
import time
import reaper, ranks
reaper.watch_session()
ranks.run_ranks(2, time.sleep, 600)
"""
AT_WORK = 3
"""Two ranks and their fork server, at least."""


def wait_until_left(session: str, enough: int, at_most: int) -> None:
    deadline = time.monotonic() + 60
    while not enough <= len(find_left(session)) <= at_most:
        assert time.monotonic() < deadline, find_left(session)
        time.sleep(0.1)


def test_nothing_is_left_by_a_session_that_is_killed() -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", SESSION], env=environment) as session:
        try:
            wait_until_left(str(session.pid), AT_WORK, 100)
            time.sleep(0.5)  # they meet
        finally:
            session.kill()
    wait_until_left(str(session.pid), 0, 0)
