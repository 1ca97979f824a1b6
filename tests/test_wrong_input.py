"""Each refusal names the wrong value and the way out: the lines of wrong_input.txt."""

import copy
import reprlib
import traceback
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields, replace
from math import inf, nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from data import assert_refused, refusals
from hypothesis import find, given
from hypothesis import strategies as st

import zbpipe
from zbpipe import CostModel, Op, OpKind, Placement, Schedule, generate, load_costs, plan, simulate, validate
from zbpipe.costs import JobCosts, Layer, LayerCosts, Link
from zbpipe.costs.file import from_data
from zbpipe.costs.job import MemoryLimit
from zbpipe.costs.model import Receives, Transport
from zbpipe.costs.transformer import typical_costs
from zbpipe.schedule import registry
from zbpipe.simulator import offload
from zbpipe.simulator.actions import Action, parse
from zbpipe.simulator.jitter import Jitter, step_times
from zbpipe.testing import check_schedule, schedules

COLUMNS = dict.fromkeys(("f", "i", "w", "activations"), (1, 1))


def odd(make: Callable[..., Any], **placed: Any) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_registered", dict(registry._registered))
        zbpipe.register("Odd", **placed)(make)
        return generate("Odd", 2, 3)


def copied(costs: Any = None, table: str = "", **how: Any) -> object:
    schedule = Schedule.from_csv(table) if table else generate("1F1B", 4, 8)
    return offload(schedule, costs or CostModel.uniform(schedule.placement, host=Link(bandwidth=2)), **how)


NAMES: dict[str, Any] = {
    **{each.__name__: each for each in (CostModel, Op, OpKind, Placement, Schedule, JobCosts, Layer, LayerCosts, Link)},
    **{each.__name__: each for each in (generate, load_costs, simulate, validate, replace, from_data, parse, find)},
    **{each.__name__: each for each in (MemoryLimit, Jitter, step_times, schedules, SimpleNamespace)},
    **{
        "stage_indices": zbpipe.stage_indices,
        "register": zbpipe.register,
        "pack": zbpipe.pack,
        "typical_costs": typical_costs,
    },
    **{
        "ONES": (1, 1, 1),
        "ZBV": generate("ZBV", 2, 2),
        "loop": Placement.loop,
        "v": Placement.v,
        "inf": inf,
        "nan": nan,
    },
    **{"ROWS": {name: [1, 1] for name in COLUMNS}, "LAYER": {"modules": ["layers.0"]} | dict.fromkeys(COLUMNS, 1)},
    "odd": odd,
    "costs": lambda **changes: CostModel(**COLUMNS | changes),
    "layers": lambda **changes: LayerCosts((Layer(("norm",), 1, 1, 1, 1),), **changes),
    "copied": copied,
    "planned": lambda **changes: plan(**{"ranks": 2, "microbatches": 4, "costs": (1, 1, 1)} | changes),
}


@pytest.mark.parametrize(("call", "words"), refusals("python"))
def test_a_call(call: str, words: str) -> None:
    assert_refused(lambda: eval(call, NAMES), words)


@pytest.mark.parametrize(("table", "words"), refusals("tables"))
def test_a_table(table: str, words: str) -> None:
    assert_refused(lambda: Schedule.from_csv(table.replace("\\n", "\n").replace("\\t", "\t")), words)


ZBV = generate("ZBV", 2, 2)
NUMBERS: dict[str, Callable[[Any], object]] = {
    "generate(ranks)": lambda junk: generate("ZBV", junk, 2),
    "generate(microbatches)": lambda junk: generate("ZBV", 2, junk),
    "stage_indices(rank)": lambda junk: zbpipe.stage_indices("ZBV", rank=junk, num_ranks=2),
    "stage_indices(num_ranks)": lambda junk: zbpipe.stage_indices("ZBV", rank=0, num_ranks=junk),
    "register(stages_per_rank)": lambda junk: zbpipe.register("X", stages_per_rank=junk),
    "place": lambda junk: registry.resolve("ZBV").place(junk),
    "Placement.loop": Placement.loop,
    "Placement.loop(stages_per_rank)": lambda junk: Placement.loop(2, junk),
    "Placement.v": Placement.v,
    "Placement.v(stages_per_rank)": lambda junk: Placement.v(2, junk),
    "stages_on": lambda junk: Placement.v(2).stages_on(junk),
}
OTHERS: dict[str, Callable[[Any], object]] = {
    "generate(costs)": lambda junk: generate("1F1B", 2, 2, costs=junk),
    "generate(schedule)": lambda junk: generate(junk, 2, 2),
    "resolve": registry.resolve,
    "stage_indices(schedule)": lambda junk: zbpipe.stage_indices(junk, rank=0, num_ranks=2),
    "register(name)": zbpipe.register,
    "register(placement)": lambda junk: zbpipe.register("X", placement=junk),
    "register(source)": lambda junk: zbpipe.register("X", source=junk),
    "register(...)(function)": zbpipe.register("X"),
    "Placement": Placement,
    "Schedule(placement)": lambda junk: replace(ZBV, placement=junk),
    "Schedule(ops)": lambda junk: replace(ZBV, ops=((junk,),)),
    "from_rows": lambda junk: Schedule.from_rows([[junk]], "mine"),
    "Op.parse": Op.parse,
    "validate(schedule)": validate,
    "validate(costs)": lambda junk: validate(ZBV, 2, junk),
    "check_schedule": check_schedule,
    "simulate(schedule)": lambda junk: simulate(junk, (1, 1, 1)),
    "simulate(costs)": lambda junk: simulate(ZBV, junk),
    "simulate(transport)": lambda junk: simulate(ZBV, (1, 1, 1), transport=junk),
    "Transport.parse": Transport.parse,
    "Receives.parse": Receives.parse,
}
junk = st.one_of(
    st.just(" ZB?"),
    st.floats(),
    st.binary(min_size=1, max_size=3),
    st.builds(dict),
    st.lists(st.just("x"), min_size=1, max_size=2),
    st.just(Action(0, "F", 0)),
)


def refused(call: Callable[[Any], object], value: object) -> None:
    with pytest.raises((TypeError, ValueError)) as error:
        call(value)
    message = str(error.value)
    assert repr(value) in message or reprlib.repr(value) in message
    # Python itself would name no way out.
    last = traceback.extract_tb(error.tb)[-1]
    assert Path(last.filename).is_relative_to(Path(zbpipe.__file__).parent), message
    assert last.line.startswith("raise "), message


@pytest.mark.parametrize("name", NUMBERS)
@given(st.one_of(junk, st.none(), st.booleans(), st.integers(max_value=-1)))
def test_a_number_has_to_be_one(name: str, value: object) -> None:
    refused(NUMBERS[name], value)


@pytest.mark.parametrize("name", OTHERS)
@given(st.one_of(junk, st.integers(10**6)))
def test_all_else_is_refused_by_name(name: str, value: object) -> None:
    refused(OTHERS[name], value)


def test_three_numbers_are_costs() -> None:
    assert simulate(ZBV, (1, 2, 3)) == simulate(ZBV, CostModel.uniform(ZBV.placement, 1, 2, 3))
    costs = CostModel.uniform(Placement.loop(3), 1, 2, 3)
    assert generate("ZB1P", 3, 4, costs=(1, 2, 3)) == generate("ZB1P", 3, 4, costs=costs)


TIMELINE = simulate(ZBV, (1, 1, 1), transport="one queue")
PLAN = zbpipe.plan(2, 3, (1, 1, 1), placements=["single"], budget=1e4)
SCHEDULES = [ZBV, ZBV.placement, TIMELINE, registry.resolve("ZBV"), *validate(replace(ZBV, ops=((), ())))[:1]]
FROZEN = [*SCHEDULES, PLAN]


@pytest.mark.parametrize("thing", FROZEN, ids=lambda thing: type(thing).__name__)
def test_frozen_means_frozen_and_hashable(thing: Any) -> None:
    assert hash(thing) == hash(copy.copy(thing))
    for field in fields(thing):
        with pytest.raises(FrozenInstanceError):
            setattr(thing, field.name, None)
        value = getattr(thing, field.name)
        assert not isinstance(value, (list, dict, set))


def test_they_keep_their_own_collections() -> None:
    rows = [list(ops) for ops in ZBV]
    schedule = Schedule("ZBV", Placement([0, 1, 1, 0]), 2, rows)  # type: ignore[arg-type]
    rows[0].clear()
    assert (schedule, hash(schedule)) == (ZBV, hash(ZBV))
    with pytest.raises(TypeError, match="does not support item assignment"):
        PLAN.bounds["single"] = 0.0  # type: ignore[index]


def test_a_repr_is_a_line() -> None:
    large = generate("ZBV", 16, 64)
    assert repr(large) == "Schedule('ZBV', p=16, m=64, 6144 ops)"
    assert repr(simulate(large, (1, 1, 1))) == "Timeline('ZBV', p=16, m=64, makespan=199.5)"
    assert repr(generate("1F1B", 2, 1)) == "Schedule('1F1B', p=2, m=1, ops='0F0 0B0 | 1F0 1B0')"
    for thing in FROZEN:
        assert len(repr(thing)) < 400
        assert "\n" not in repr(thing)
