"""What is said of a typical transformer block is what one of such widths was seen to do."""

from collections.abc import Callable
from functools import partial
from typing import Any

import activation_memory
import llama
import pytest
import torch
from split_backward import Contender, OpBytes, Size
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.pipelining import PipelineStage
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from zbpipe import OpKind, Placement
from zbpipe.costs.transformer import LLAMA_3_8B, Block, Checkpointing, typical_costs, typical_times

SIZE = Size(dim=128, seq=512, batch=1, head_dim=32, blocks=2)
BLOCK = Block(dim=128, queries=128, keys_and_values=2 * SIZE.kv_heads * 32, hidden=448, fused_qkv=False)
NORMS = 2 * BLOCK.dim
"""On the CPU each norm also keeps its result before the weights, which the kernels of GPUs do not."""
FLOAT = 4
SENT = 0 if hasattr(PipelineStage, "release_fwd_send_outputs") else BLOCK.dim
"""torch before 2.15 keeps what a stage sends until its backward, and without zbpipe's split what it receives."""
KEPT = {"F": SENT, "I": 0, "W": 0, "B": 2 * SENT}


def titans_policy() -> Callable[..., CheckpointPolicy]:
    """Every second product and the attention's result, as TorchTitan's SelectiveAC on the CPU."""
    products = {False: 0, True: 0}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
            return CheckpointPolicy.MUST_SAVE
        if op is torch.ops.aten.mm.default:
            products[context.is_recompute] += 1
            if products[context.is_recompute] % 2:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def expected(checkpointing: Checkpointing) -> dict[str, tuple[float, float]]:
    """(peak, what is left) of each op on a stage of several blocks, in elements for each token."""
    kept, waits = (SIZE.blocks * each for each in (BLOCK.kept_by_f(checkpointing), BLOCK.kept_by_i()))
    working = {kind: BLOCK.working(checkpointing, kind) for kind in OpKind}
    norms = SIZE.blocks * NORMS if checkpointing is Checkpointing.NONE else 0
    recomputed_norms = 0 if checkpointing is Checkpointing.NONE else NORMS
    return {
        "F": (kept + norms + working[OpKind.F], kept + norms),
        "I": (max(kept + norms, waits) + recomputed_norms + working[OpKind.I], waits),
        "W": (waits + working[OpKind.W], 0),
        "B": (kept + norms + recomputed_norms + working[OpKind.B], 0),
    }


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    "checkpointing",
    [pytest.param(each, marks=[] if each is Checkpointing.SELECTIVE else pytest.mark.long) for each in Checkpointing],
)
def test_a_stage_takes_what_the_arithmetic_says(checkpointing: Checkpointing, monkeypatch: pytest.MonkeyPatch) -> None:
    def contexts() -> Any:
        return create_selective_checkpoint_contexts(titans_policy())

    wrap = partial(checkpoint_wrapper, early_stop=False, context_fn=contexts)
    monkeypatch.setitem(llama._WRAPPERS, "selective", wrap)
    job = activation_memory.Job(checkpointing.value, 1, 1, SIZE.blocks, "cpu")
    measured: dict[str, OpBytes] = {}
    contenders: tuple[Contender, ...] = ("unsplit", "zbpipe")
    for contender in contenders:
        found = activation_memory.op_bytes(SIZE, job, contender)
        assert found is not None
        measured |= found
    per_token = FLOAT * SIZE.seq * SIZE.batch
    for op, (peak, after) in expected(checkpointing).items():
        assert measured[op].peak / per_token == pytest.approx(peak + SENT * (op in "IB"), rel=0.01), op
        assert measured[op].after / per_token == pytest.approx(after + KEPT[op], rel=0.01, abs=1), op


def test_llama_3_8b() -> None:
    """By hand: 8 heads of 128 for keys and values, and a block's 4096 wide input."""
    waits, saved = 4 * 4096 + 2 * 4096 + 2048 + 3 * 14336, 4 * 4096 + (2 * 4096 + 2048) + 4 * 14336
    assert LLAMA_3_8B.kept_by_i() == waits == 17 * 4096
    assert LLAMA_3_8B.kept_by_f("none") == saved
    assert LLAMA_3_8B.kept_by_f("selective") == 8 * 4096
    assert typical_times("selective") == pytest.approx((1, 0.99 + 0.3, 0.67))


@pytest.mark.parametrize("stages_per_rank", [1, 2, 4])
@pytest.mark.parametrize("checkpointing", Checkpointing)
def test_the_cost_model_is_the_blocks(checkpointing: Checkpointing, stages_per_rank: int) -> None:
    """Of 8 blocks a rank, whatever stages they are cut into."""
    costs = typical_costs(Placement.loop(3, stages_per_rank), checkpointing)
    share = 8 * LLAMA_3_8B.kept_by_f(checkpointing)
    per_stage = range(0, 3 * stages_per_rank, 3)
    assert sum(costs.activations[stage] for stage in per_stage) == pytest.approx(1)
    assert sum(costs.of(stage, OpKind.W).frees for stage in per_stage) * share == pytest.approx(
        8 * LLAMA_3_8B.kept_by_i()
    )
    assert (sum(costs.f[stage] for stage in per_stage), sum(costs.w[stage] for stage in per_stage)) == (1, 0.67)
    for kind in OpKind:
        beyond = costs.of(0, kind).needs - max(costs.of(0, kind).adds, 0)
        assert beyond * share == pytest.approx(LLAMA_3_8B.working(checkpointing, kind))


def test_times_of_ones_own_and_messages() -> None:
    costs = typical_costs(Placement.v(2), "full", times=(2, 4, 1), comm=0.5)
    assert (costs.f, costs.i, costs.w) == ((1,) * 4, (2,) * 4, (0.5,) * 4)
    assert costs.transfer(0, 1) == 0.5
