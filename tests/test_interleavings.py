"""A slice of tests/interleavings.py: whatever the order of the ranks' turns, all come to the right end."""

from itertools import chain, islice
from random import Random

import pytest
from fifo import BACKENDS
from interleavings import FAULTS, Case, Search, count_sound, explore, try_faults
from turns import Choices

from zbpipe.costs.model import Receives
from zbpipe.schedule import registry


@pytest.mark.parametrize("case", [Case("ZBH1", 3, 2, "fifo_queue_per_peer"), Case("ZBV", 2, 2)], ids=str)
def test_steps_end_right_in_any_order(case: Case) -> None:
    choices = chain((Choices(random=Random(seed)) for seed in range(60)), islice(Search(), 60))
    orders = {tuple(each.made) for each in explore(case, choices)}
    assert len(orders) > 110
    assert count_sound(case, 200) == 200


@pytest.mark.long
@pytest.mark.usefixtures("short_search")
@pytest.mark.parametrize("queues", BACKENDS)
def test_every_schedule_on_all_queues(queues: str) -> None:
    """Half of the ways to receive on each kind of queues."""
    ours = [algorithm.name for algorithm in registry.schedules().values() if algorithm.source == "zbpipe"]
    for number, name in enumerate(ours, [*BACKENDS].index(queues)):
        for receives in [*Receives][number % 2 :: 2]:
            assert len(list(explore(Case(name, 3, 4, queues, receives), [Choices(random=Random(number))]))) == 1


@pytest.mark.parametrize("what", FAULTS)
def test_a_fault_ends_all_ranks_with_its_cause(what: str) -> None:
    assert try_faults(what, range(16)) == 16
