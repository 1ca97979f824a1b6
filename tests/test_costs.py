"""Costs of stages, layers and jobs refuse what is no cost, and nobody changes them afterwards."""
# mypy: disable-error-code="arg-type, dict-item, return-value"
# Wrong arguments are what it tries.

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from math import inf, nan
from typing import Any

import numpy as np
import pytest
import torch

from zbpipe import CostModel, OpKind, Placement
from zbpipe.costs import JobCosts, Layer, LayerCosts, Link
from zbpipe.costs.model import rank_shares
from zbpipe.schedule.frozendict import FrozenDict

ONES = dict.fromkeys(("f", "i", "w", "activations"), (1, 1))


@pytest.mark.parametrize("name", [*ONES, "gather", "reduce", "message_bytes", "overhead"])
@pytest.mark.parametrize("wrong", ["1", None, True, b"1", 1j, [1], -1, nan, inf, 1e200, 10**400])
def test_what_is_no_number_is_refused(name: str, wrong: Any) -> None:
    words = f"the costs of stages cannot have {name} = {wrong!r}: give a number from 0 to 1e+100"
    with pytest.raises((TypeError, ValueError), match=re.escape(words)):
        CostModel(**ONES | {name: wrong if name in ("message_bytes", "overhead") else (1, wrong)})


STAGES = "the costs of stages cannot have "
LAYERS = (Layer(("norm",), 1, 1, 1, 1),)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        *(
            (
                lambda wrong=wrong: CostModel(**ONES | {"w": wrong}),
                f"{STAGES}w = {wrong!r}: give one number for each stage",
            )
            for wrong in ("11", None, 1, {1, 2}, {1: 2})
        ),
        (lambda: CostModel((), (), (), ()), "at least one stage"),
        (lambda: CostModel(**ONES | {"f": ()}), "need one number for each stage, got {'f': 0, 'i': 2"),
        (lambda: CostModel(*[(1, 1)] * 5), "takes 5 positional arguments but 6 were given"),
        (lambda: CostModel(**ONES, freed_by_i="0"), "freed_by_i = '0': give a number up to 1"),
        (lambda: CostModel(**ONES, freed_by_i=2), "freed_by_i = 2: give a number up to 1"),
        *(
            (lambda wrong=wrong: CostModel(**ONES, freed_by_i=wrong), f"freed_by_i = {wrong!r}: give a number up to 1")
            for wrong in (-inf, nan, 10**400)
        ),
        (lambda: CostModel(**ONES, freed_by_i=(0, None)), "freed_by_i = None: give a number up to 1"),
        (
            lambda: CostModel(**ONES, freed_by_i=[0]),
            "freed_by_i has to be one number, or one for each stage: got 1 for 2",
        ),
        (lambda: CostModel(**ONES, reduce=[1]), "reduce has to be one number, or one for each stage: got 1 for 2"),
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
            "links = {(0, 1): 0.5}: give a zbpipe.costs.Link for each pair",
        ),
        (lambda: CostModel(**ONES, links={(0, -1): Link()}), "links = {(0, -1): Link("),
        *(
            (lambda wrong=wrong: Link(wrong), f"a link cannot have latency = {wrong!r}: give a number")
            for wrong in ("1", -1.0, nan, inf)
        ),
        *(
            (
                lambda wrong=wrong: Link(bandwidth=wrong),
                f"a link cannot have bandwidth = {wrong!r}: give a number above 0",
            )
            for wrong in (None, 0, -1.0, nan)
        ),
        (lambda: CostModel.uniform(4), "uniform costs need a zbpipe.Placement, for example Placement.loop(4), got 4"),
        (lambda: CostModel.uniform(Placement.loop(2), "1"), "uniform costs cannot have f = '1': give a number"),
        (lambda: CostModel.uniform(Placement.loop(2), comm=-1), "uniform costs cannot have comm = -1: give a number"),
        (lambda: Layer("norm", 1, 1, 1, 1), "modules = 'norm': give a list of names"),
        (lambda: Layer((3,), 1, 1, 1, 1), "modules = (3,): give a list of names"),
        (lambda: Layer((), 1, 1, 1, 1), "modules = (): give at least one name"),
        (lambda: Layer(("a",), "1", 1, 1, 1), "the layer a cannot have f = '1': give a number"),
        (lambda: Layer(("a",), 1, -1, 1, 1), "the layer a cannot have i = -1: give a number from 0"),
        (lambda: Layer(("a",), 1, 1, True, 1), "the layer a cannot have w = True: give a number"),
        (lambda: Layer(("a",), 1, 1, 1, nan), "the layer a cannot have activations = nan: give a number"),
        (lambda: LayerCosts(()), "at least one layer, got none"),
        (lambda: LayerCosts((3,)), "layers = (3,): give a list of zbpipe.costs.Layer"),
        (lambda: LayerCosts(LAYERS, link=3), "link = 3: give a zbpipe.costs.Link"),
        (lambda: LayerCosts(LAYERS, links={0: Link()}), "links = {0: Link"),
        (lambda: LayerCosts(LAYERS, message_bytes=-1), "the costs of layers cannot have message_bytes = -1"),
        (
            lambda: LayerCosts(LAYERS, freed_by_i=2),
            "the costs of layers cannot have freed_by_i = 2: give a number up to 1",
        ),
        (lambda: LayerCosts(LAYERS, working={OpKind.I: (1, 2)}), "one number, or one for each layer: got 2 for 1"),
        (lambda: JobCosts(None), "a job cannot have costs = None: give a zbpipe.CostModel or zbpipe.costs.LayerCosts"),
        (
            lambda: JobCosts(CostModel(**ONES), (0, 1)),
            "a job cannot have placement = (0, 1): give a zbpipe.Placement, or",
        ),
        (
            lambda: JobCosts(CostModel(**ONES), transport=1),
            "a job cannot have transport = 1: give one of 'ideal', 'one-",
        ),
        (lambda: JobCosts(CostModel(**ONES)).on(Placement.v(2)), "the costs are for 2 stages, but the placement has 4"),
        (lambda: JobCosts(LayerCosts(LAYERS)).on(Placement.v(1)), "1 layers cannot be cut into 2 stages"),
        (lambda: JobCosts(LayerCosts(LAYERS), Placement.loop(1)), "places stages, but the costs are of layers"),
        (
            lambda: JobCosts(CostModel(**ONES), Placement.loop(2)).require_ranks(3),
            "rank_of = [0, 1], which is for 2 ranks, got 3: use 2, or omit",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(words)):
        make()


@pytest.mark.parametrize("array", [np.array, torch.tensor])
def test_arrays_are_lists_of_numbers(array: Callable[[Any], Any]) -> None:
    given, several = array([1.0, 1.0]), array([0.5, 0.25])
    costs = CostModel(given, given, given, given, freed_by_i=several, working={OpKind.I: several}, gather=several)
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


LINKS = {(0, 1): Link(0.5), (1, 0): Link(1)}


@pytest.mark.parametrize(
    "made",
    [
        lambda links: CostModel(**ONES, links=links),
        lambda links: LayerCosts(LAYERS, links=links),
        lambda links: JobCosts(CostModel([1, 1], (1, 1), (1, 1), (1, 1), links=links), Placement.loop(2), [1, 2]),
    ],
)
def test_equal_costs_have_equal_hashes(made: Callable[[Any], Any]) -> None:
    given = dict(LINKS)
    costs, same = made(given), made(dict(reversed(LINKS.items())))
    given.clear()
    assert costs == same
    assert hash(costs) == hash(same)
    assert pickle.loads(pickle.dumps(costs)) == costs
    assert {costs: "found"}[same] == "found"
    assert costs != made({})


def test_a_frozen_mapping_equals_any_other() -> None:
    assert FrozenDict({1: 2}) == {1: 2} != FrozenDict({1: 3})
    assert hash(FrozenDict({1: 2, 3: 4})) == hash(FrozenDict({3: 4, 1: 2}))
    assert repr(FrozenDict({1: 2})) == "FrozenDict({1: 2})"


def test_shares_are_what_a_rank_keeps_of_a_microbatch() -> None:
    costs = CostModel((1,) * 4, (1,) * 4, (1,) * 4, (1, 2, 3, 5))
    assert rank_shares(Placement.v(2), costs) == (6, 5)
    assert rank_shares(Placement.v(2), CostModel.uniform(Placement.v(2))) == (1, 1)
    assert costs.of(3, OpKind.F).adds == 5
