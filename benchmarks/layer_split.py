"""What a split of the layers that knows their costs is worth, on a model like Llama 3 8B with a heavy head.

python benchmarks/layer_split.py  # a Markdown table
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from zbpipe import CostModel, Layer, LayerCosts, Link, Placement, generate, plan, simulate
from zbpipe.layer_costs import Split

RANKS, MICROBATCHES = 8, 32
BLOCKS, DIM, KV_DIM, FFN_DIM, TOKENS = 32, 4096, 1024, 14336, 8192
FLOPS = 4e14
"""Per second, of a GPU at work."""
LINK = Link(latency=1e-5, bandwidth=5e10)
BYTES = 2
"""Of a number in bfloat16."""


def model(vocabulary: int) -> LayerCosts:
    """Seconds from the floating-point operations, bytes from what autograd keeps without checkpointing.

    A product with a weight of a x b takes 2ab operations a token in each of F, I and W. Causal attention has two
    products over half of the tokens in F; its backward has two and a half times the work and belongs to I. Norms are
    not counted, and the embedding, which is bound by memory, as a twentieth of a block's F, in F and in W.
    """
    weights = 2 * DIM * DIM + 2 * DIM * KV_DIM + 3 * DIM * FFN_DIM
    attention = 2 * TOKENS * DIM

    def seconds(operations: float) -> float:
        return operations * TOKENS / FLOPS

    def kept(numbers_a_token: float) -> float:
        return numbers_a_token * TOKENS * BYTES

    f, i, w = seconds(2 * weights + attention), seconds(2 * weights + 2.5 * attention), seconds(2 * weights)
    # Two norms' inputs and outputs, q, k, v, what attention gives, and three of the feed-forward's width.
    block = kept(6 * DIM + 2 * KV_DIM + 3 * FFN_DIM)
    head = seconds(2 * DIM * vocabulary)
    return LayerCosts(
        (
            Layer(("tok_embeddings",), f / 20, 0.0, f / 20, 0.0),
            *(Layer((f"layers.{number}",), f, i, w, block) for number in range(BLOCKS)),
            Layer(("norm", "lm_head"), head, head, head, kept(2 * DIM + vocabulary)),
        ),
        link=LINK,
        message_bytes=kept(DIM),
    )


def on_the_even_split(costs: LayerCosts, name: str) -> float:
    """Seconds that a schedule with a name takes there."""
    schedule = generate(name, RANKS, MICROBATCHES)
    return simulate(schedule, costs.even(schedule.placement)).makespan


def heaviest(stages: CostModel, placement: Placement) -> float:
    """The work of the rank with the most, as a multiple of the mean."""
    work = [
        sum(stages.f[stage] + stages.i[stage] + stages.w[stage] for stage in placement.stages_on(rank))
        for rank in range(placement.num_ranks)
    ]
    return max(work) / (sum(work) / len(work))


def sizes(split: Split) -> str:
    return " ".join(str(len(stage)) for stage in split)


def row(vocabulary: int, placement: str, named: str, budget: float | None) -> Sequence[str]:
    costs = model(vocabulary)
    # What 1F1B's first rank holds, if all ranks keep equally much.
    limit = sum(layer.activations for layer in costs.layers)
    found = plan(RANKS, MICROBATCHES, costs, limit, placements=[placement], budget=budget)
    assert found.even is not None
    assert found.split is not None
    where = found.schedule.placement
    reached, even = found.makespan, found.even.makespan
    fixed = on_the_even_split(costs, named)
    return (
        f"{vocabulary} ({costs.layers[-1].f / costs.layers[1].f:.1f})",
        placement,
        f"{named} {fixed:.3f}",
        f"{even:.3f}",
        f"{reached:.3f}",
        f"{100 * (1 - reached / even):.1f} %",
        f"{100 * (1 - reached / fixed):.1f} %",
        f"{heaviest(costs.even(where), where):.2f}, {heaviest(costs.stages(found.split), where):.2f}",
        sizes(found.split),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, help="ops that each search may time; default: the planner's")
    budget = parser.parse_args().budget
    print(
        "| vocabulary (head in blocks) | placement | even split: named | even split: plan | split and plan | saves"
        " | to the named | heaviest rank: even, split | layers by stage |"
    )
    print("|---|---|---:|---:|---:|---:|---:|---|---|")
    for vocabulary in (128256, 256000):
        for placement, named in (("single", "1F1B"), ("v", "ZBV")):
            print("| " + " | ".join(row(vocabulary, placement, named, budget)) + " |", flush=True)


if __name__ == "__main__":
    main()
