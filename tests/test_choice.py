"""The number of stages per rank, and loop or wave: by the simulated step of a model's own cut."""

from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import zbpipe
from zbpipe import CostModel, Placement
from zbpipe.costs import JobCosts, MemoryLimit
from zbpipe.costs.layers import Layer, LayerCosts, balance, split_of
from zbpipe.costs.transformer import PAPERS_TIMES, Checkpointing, Work, typical_times, usual_costs
from zbpipe.estimation import devices
from zbpipe.estimation.cut import Choice, choose
from zbpipe.schedule.registry import resolve, stages_for
from zbpipe.simulator import simulate

ZB, LOOP = resolve("ZB"), resolve("ZBLoop")
SELECTIVE, FULL = Checkpointing.SELECTIVE, Checkpointing.FULL
H100 = devices.find("H100")


@dataclass
class Model:
    """Equal blocks, and a head with the work of `head` blocks, cut by work."""

    num_layers: int
    head: float = 0.0

    @property
    def products(self) -> float:
        return self.num_layers + self.head

    def work(self, placement: Placement) -> Work:
        head = tuple(self.head * each for each in PAPERS_TIMES)
        layers = LayerCosts(
            tuple(Layer(("block",), f, i, w, 0) for f, i, w in [*[typical_times("selective")] * self.num_layers, head])
        )
        return layers.times(split_of(balance(layers, placement)))


def tokens(overhead: float, model: Model, ranks: int) -> float:
    """The number for which the overhead of an op is this part of F of the average rank."""
    return ranks * H100.overhead * H100.products * H100.peak / (2 * model.products * overhead) if overhead else 0.0


def step(choice: Choice, microbatches: int, model: Model, how: Checkpointing, overhead: float) -> float:
    known = usual_costs(choice.placement, how, work=model.work(choice.placement))
    known = replace(known, overhead=overhead)
    ranks, stages = choice.placement.num_ranks, len(choice.placement.stages_on(0))
    made = choice.algorithm.make(ranks, microbatches, stages_per_rank=stages, costs=known)
    return simulate(made, known).makespan


@settings(max_examples=10)
@given(
    ranks=st.integers(1, 4),
    microbatches=st.integers(1, 8),
    model=st.builds(Model, st.integers(1, 20), st.floats(0, 6)),
    how=st.sampled_from(list(Checkpointing)),
    overhead=st.sampled_from([0.0, 0.01, 0.1]),
)
def test_what_is_chosen_can_be_cut_and_no_other_number_is_shorter(
    ranks: int, microbatches: int, model: Model, how: Checkpointing, overhead: float
) -> None:
    """Up to the 3 % that a search may gain over the filled orders. All ranks choose alike."""

    def find(number: int | None = None) -> Choice:
        given = {"tokens": tokens(overhead, model, ranks), "stages_per_rank": number}
        return choose(ZB, ranks, microbatches, model, how, **given)  # type: ignore[arg-type]

    if model.num_layers < ranks - 1:  # the head is a layer, too
        with pytest.raises(ValueError, match="layers cannot be cut into"):
            find()
        return
    chosen = find()
    assert chosen == find()
    numbers = stages_for(model.num_layers, ranks)
    assert len(chosen.placement.stages_on(0)) in numbers
    for number in numbers:
        by_hand = find(number)
        assert len(by_hand.placement.stages_on(0)) == number
        assert step(chosen, microbatches, model, how, overhead) <= 1.03 * step(
            by_hand, microbatches, model, how, overhead
        )


@pytest.mark.parametrize(
    ("ranks", "model", "overhead", "words"),
    [
        (4, Model(32), 0.0, "ZB runs 4 stages per rank in a wave: "),
        # 16 stages of one block each do not make room for a head of four.
        (4, Model(16, 4), 0.0, "ZB runs 2 stages per rank in a wave: "),
        # 16 stages share 29 layers. A wave has the first and the last one on rank 0.
        (8, Model(28, 1), 0.0, "ZB runs 2 stages per rank in a loop: "),
        (4, Model(32), 0.05, "ZB runs 2 stages per rank in a wave: "),
        (4, Model(32), 0.3, "ZB runs 1 stage per rank: "),
        (4, Model(6), 0.0, "ZB runs 1 stage per rank: "),
    ],
)
def test_layers_the_head_and_overhead_decide(ranks: int, model: Model, overhead: float, words: str) -> None:
    found = choose(ZB, ranks, 16, model, SELECTIVE, tokens=tokens(overhead, model, ranks))
    assert found.words.startswith(words)


def test_a_number_that_is_given_wins() -> None:
    """Also where an even cut makes the wave longer."""
    model = Model(28, 1)
    for number, name in ((1, "ZB"), (2, "ZBLoop"), (3, "ZB")):
        found = choose(ZB, 8, 16, model, SELECTIVE, stages_per_rank=number)
        assert (found.algorithm.name, found.placement) == (name, Placement.loop(8, number))
    assert choose(LOOP, 4, 8, Model(32), FULL).placement == Placement.loop(4, 4)
    assert choose(resolve("ZBV"), 8, 16, model) == Choice(resolve("ZBV"), Placement.v(8))
    with pytest.raises(ValueError, match="ZBV runs 2 stages per rank, got stages_per_rank=3: omit it, or take ZB"):
        choose(resolve("ZBV"), 8, 16, model, stages_per_rank=3)
    with pytest.raises(ValueError, match="29 layers cannot be cut into 64 stages"):
        choose(ZB, 8, 16, model, stages_per_rank=8)


def test_measured_costs_and_limits() -> None:
    """Costs of one placement allow that one. A limit below the least possible is refused, with the way out."""
    for placement, words in (
        (Placement.loop(4, 2), "ZB runs 2 stages per rank in a loop"),
        (Placement.v(4, 6), "ZB runs 6 stages per rank in a wave"),
    ):
        found = choose(ZB, 4, 8, Model(32), measured=JobCosts(CostModel.uniform(placement), placement))
        assert (found.placement, found.words) == (placement, words)
    odd = Placement((0, 1, 0, 1, 1, 0))
    with pytest.raises(ValueError, match="the measured stages are not placed as those of ZB: measure with that"):
        choose(ZB, 2, 8, Model(32), measured=JobCosts(CostModel.uniform(odd), odd))
    with pytest.raises(ValueError, match=r"memory_limit = 0\.1x is too small for ZB"):
        choose(ZB, 4, 8, Model(32), memory_limit=MemoryLimit.parse("0.1x"))


@pytest.mark.parametrize(
    ("layers", "stages"), [(32, (0, 7, 8, 15)), (16, (0, 7, 8, 15)), (15, (0, 7)), (8, (0, 7)), (7, (0,)), (1, (0,))]
)
def test_stages_for_an_own_loop(layers: int, stages: tuple[int, ...]) -> None:
    assert zbpipe.stage_indices("ZB", rank=0, num_ranks=4, layers=layers) == stages
    assert zbpipe.stage_indices("ZBV", rank=0, num_ranks=4, layers=layers) == (0, 7)
    assert zbpipe.stage_indices("ZB", rank=0, num_ranks=4, layers=layers, stages_per_rank=3) == (0, 4, 8)
    assert len(zbpipe.stage_indices("ZBLoop", rank=0, num_ranks=4, layers=layers)) == len(stages)
