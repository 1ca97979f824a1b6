"""Costs refuse what is no cost, and nobody changes them afterwards."""
# mypy: disable-error-code="arg-type, dict-item, return-value"
# Wrong arguments are what it tries.

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zbpipe import CostModel, OpKind, Placement
from zbpipe.costs import Link
from zbpipe.costs.job import as_cost_model
from zbpipe.costs.model import rank_shares
from zbpipe.schedule.frozendict import FrozenDict

ONES = dict.fromkeys(("f", "i", "w", "activations"), (1, 1))


@pytest.mark.parametrize("name", ONES)
@pytest.mark.parametrize("wrong", ["1", None, True, b"1", 1j, [1]])
def test_what_is_no_number_is_refused(name: str, wrong: Any) -> None:
    words = f"the costs of stages cannot have {name} = {wrong!r}: give a number from 0 to 1e+100"
    with pytest.raises(TypeError, match=re.escape(words)):
        CostModel(**ONES | {name: (1, wrong)})


@pytest.mark.parametrize("wrong", ["11", None, 1, {1, 2}, {1: 2}])
def test_what_is_no_list_of_numbers_is_refused(wrong: Any) -> None:
    words = f"the costs of stages cannot have w = {wrong!r}: give one number for each stage, for example (1, 1)"
    with pytest.raises(TypeError, match=re.escape(words)):
        CostModel(**ONES | {"w": wrong})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: CostModel((), (), (), ()), "at least one stage"),
        (lambda: CostModel(**ONES, freed_by_i="0"), "freed_by_i = '0': give a number up to 1"),
        (lambda: CostModel(**ONES, freed_by_i=(0, None)), "freed_by_i = None: give a number up to 1"),
        (lambda: CostModel(**ONES, working=3), "working = 3: give numbers by zbpipe.OpKind"),
        (lambda: CostModel(**ONES, working={"I": 3}), "working = {'I': 3}: give numbers by zbpipe.OpKind"),
        (lambda: CostModel(**ONES, working={OpKind.OF: 3}), "give numbers by zbpipe.OpKind F, I, W or B, for example"),
        (lambda: CostModel(**ONES, working={OpKind.I: -3}), "working[I] = -3: give a number from 0"),
        (lambda: CostModel(**ONES, working={OpKind.I: (3, None)}), "working[I] = None: give a number from 0"),
        (lambda: CostModel(**ONES, working={OpKind.I: (3, 3, 3)}), "working[I] has to be one number, or one for each"),
        (lambda: CostModel(**ONES, message_bytes="1 MB"), "message_bytes = '1 MB': give a number"),
        (lambda: CostModel(**ONES, link=0.5), "link = 0.5: give a zbpipe.costs.Link"),
        (lambda: CostModel(**ONES, links=[Link()]), "links = [Link("),
        (
            lambda: CostModel(**ONES, links={(0, 1): 0.5}),
            "links = {(0, 1): 0.5}: give a zbpipe.costs.Link for each pair of ranks",
        ),
        (lambda: CostModel(**ONES, links={(0, -1): Link()}), "links = {(0, -1): Link("),
        (lambda: Link("1"), "a link cannot have latency = '1': give a number"),
        (lambda: Link(bandwidth=None), "a link cannot have bandwidth = None: give a number above 0"),
        (lambda: CostModel.uniform(4), "uniform costs need a zbpipe.Placement, for example Placement.loop(4), got 4"),
        (lambda: CostModel.uniform(Placement.loop(2), "1"), "uniform costs cannot have f = '1': give a number"),
        (lambda: CostModel.uniform(Placement.loop(2), comm=-1), "uniform costs cannot have comm = -1: give a number"),
        (
            lambda: as_cost_model((1, 1), Placement.loop(2)),
            "three numbers (f, i, w), for example (1, 1, 1), got (1, 1)",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(words)):
        make()


@pytest.mark.parametrize("array", [np.array, torch.tensor])
def test_arrays_are_lists_of_numbers(array: Callable[[Any], Any]) -> None:
    given, several = array([1.0, 1.0]), array([0.5, 0.25])
    costs = CostModel(given, given, given, given, several, working={OpKind.I: several}, gather=several)
    more = {"freed_by_i": (0.5, 0.25), "working": {OpKind.I: (0.5, 0.25)}, "gather": (0.5, 0.25)}
    assert costs == CostModel(**ONES, **more)
    for wrong in (array([[1.0, 1.0]]), array(1.0)):
        with pytest.raises(TypeError, match=r"the costs of stages cannot have f = \[?(\[1.0, 1.0\]|1.0)"):
            CostModel(wrong, given, given, given)


def test_costs_do_not_change_with_what_they_were_made_of() -> None:
    f, links = [1, 1], {(0, 1): Link(0.5)}
    costs = CostModel(f, (1, 1), (1, 1), (1, 1), links=links)  # type: ignore[arg-type]
    f[0], links[0, 1] = 9, Link(9)
    assert (costs.f, costs.transfer(0, 1)) == ((1, 1), 0.5)
    with pytest.raises(TypeError, match="does not support item assignment"):
        costs.links[0, 1] = Link()  # type: ignore[index]
    with pytest.raises(AttributeError):
        costs.f = (2, 2)  # type: ignore[misc]


@given(st.dictionaries(st.tuples(st.integers(0, 3), st.integers(0, 3)), st.builds(Link, st.sampled_from([0.0, 1.0]))))
def test_equal_costs_have_equal_hashes(links: dict[tuple[int, int], Link]) -> None:
    costs = CostModel(**ONES, links=links)
    same = CostModel(**ONES, links=dict(reversed(links.items())))
    assert costs == same
    assert hash(costs) == hash(same)
    assert pickle.loads(pickle.dumps(costs)) == costs
    assert {costs: "found"}[same] == "found"


def test_a_frozen_mapping_equals_any_other() -> None:
    assert FrozenDict({1: 2}) == {1: 2} != FrozenDict({1: 3})
    assert hash(FrozenDict({1: 2, 3: 4})) == hash(FrozenDict({3: 4, 1: 2}))
    assert repr(FrozenDict({1: 2})) == "FrozenDict({1: 2})"


def test_shares_are_what_a_rank_keeps_of_a_microbatch() -> None:
    costs = CostModel((1,) * 4, (1,) * 4, (1,) * 4, (1, 2, 3, 5))
    assert rank_shares(Placement.v(2), costs) == (6, 5)
    assert rank_shares(Placement.v(2), CostModel.uniform(Placement.v(2))) == (1, 1)
    assert costs.adds(3, OpKind.F) == 5
