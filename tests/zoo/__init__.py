"""Small models of every kind that users write."""

from itertools import chain

from zoo import (
    attention,
    attributes,
    checkpoints,
    compiled,
    differentiated,
    experts,
    hooks,
    inplace,
    layers,
    linears,
    pipelines,
    precision,
    shared,
    views,
)

CASES = tuple(
    chain.from_iterable(
        module.CASES
        for module in (
            linears,
            views,
            attention,
            layers,
            hooks,
            inplace,
            attributes,
            shared,
            differentiated,
            precision,
            experts,
            checkpoints,
            compiled,
            pipelines,
        )
    )
)

BY_NAME = {case.name: case for case in CASES}
assert len(BY_NAME) == len(CASES), "two models of one name"
