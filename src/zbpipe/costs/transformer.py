"""Costs of a typical transformer block by activation checkpointing, for schedules before any measurement.

The block is that of Llama: RMSNorm, grouped-query attention by a kernel that keeps its inputs and result, RMSNorm,
SwiGLU. The unit is elements per token, 2 bytes each in bfloat16. Small tensors do not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zbpipe.costs.model import CostModel, Link, Named
from zbpipe.schedule.ir import COMPUTATIONS, OpKind, Placement, Schedule

_UNFUSED = 3.0
"""Memory traffic of a block's small kernels without torch.compile, relative to the fused ones. TorchTitan, December
2024: Llama 3 8B trains 1.16 times as fast with torch.compile on 8 and on 128 H100."""
PAPERS_TIMES = (1.0, 0.99, 0.67)
"""F, I and W of a model of 6.2 billion parameters on A100, relative to F: 29.718, 29.444 and 19.927 ms without
checkpointing. From Zero Bubble Pipeline Parallelism (arXiv 2401.10241), the table of profiled times."""
_SEQ_LEN = 8192
_BLOCKS_PER_RANK = 8
"""Blocks per rank. Ops need the working memory of one block, so its share falls with the number of blocks."""
_COMM = 0.01
"""Seconds of a message if F takes one: enough to order the messages. TP and CP divide messages as they divide F."""
NOTE = (
    "* torch's own split: it fails under selective checkpointing and torch.compile, recomputes for each W under full,"
    " and takes more memory than is shown. zbpipe's split runs the same orders as ZBV, DualPipeVSplit and"
    " InterleavedZeroBubbleSplit"
)
"""Note below tables that mark such schedules with an asterisk."""


Work = Sequence[tuple[float, float, float]]
"""F, I and W of each stage, in any unit of time."""


class Checkpointing(Named):
    """Activation checkpointing, which determines the memory that a block keeps after F."""

    NONE = "none"
    """All tensors that autograd saves."""
    SELECTIVE = "selective"
    """Every second product and the attention's result, TorchTitan's default. I recomputes the rest."""
    FULL = "full"
    """The input. I recomputes the rest."""

    @property
    def words(self) -> str:
        return "without checkpointing" if self is Checkpointing.NONE else f"with {self} checkpointing"


@dataclass(frozen=True)
class Block:
    """The widths of a block. Its methods return elements per token, on one of `tp` GPUs that share the block.

    Tensor parallelism (with sequence parallelism) cuts one side of each product, the norms, and the block's input.

        >>> block = Block(dim=4096, queries=4096, keys_and_values=2048, hidden=14336)
        >>> [block.kept_by_f(each) for each in Checkpointing], block.kept_by_i()
        ([83968.0, 32768.0, 4096.0], 69632.0)
    """

    dim: int
    """Width of the hidden states."""
    queries: int
    """Width of the queries of all heads together."""
    keys_and_values: int
    """Width of keys and values of all heads together."""
    hidden: int
    """Width of the feed-forward layer."""
    fused_qkv: bool = True
    """Whether one product computes queries, keys and values, as in TorchTitan 0.3. In 0.2 these are three."""
    keeps_scattered: bool = False
    """Whether selective checkpointing keeps the results of TP's two reduce-scatters, as in TorchTitan 0.2."""

    @property
    def parameters(self) -> int:
        """Number of parameters, over all GPUs that share the block."""
        products = (2 * self.queries + self.keys_and_values + 3 * self.hidden) * self.dim
        return products + 2 * self.dim

    def kept_by_f(self, checkpointing: Checkpointing | str, tp: int = 1) -> float:
        """Memory kept from F to I.

        - Full: the input.
        - Selective: also the attention's result, and the first, third and fifth of the five products q-k-v, out, gate,
          up and down; with separate q, k and v these are q, v, gate and down. TP does not cut the result of down.
        - None: input and result of both norms, q, k and v, rotated, the attention's result, gate before and after its
          activation function, up, and their product.
        """
        match Checkpointing.parse(checkpointing):
            case Checkpointing.NONE:
                cut = 2 * self.dim + 2 * self.queries + self.keys_and_values + 4 * self.hidden
                return 2 * self.dim + cut / tp
            case Checkpointing.SELECTIVE:
                keys_and_values = self.keys_and_values if self.fused_qkv else self.keys_and_values / 2
                scattered = 2 * self.dim if self.keeps_scattered and tp > 1 else 0
                return self.dim + (self.dim + 2 * self.queries + keys_and_values + self.hidden + scattered) / tp
            case Checkpointing.FULL:
                return self.dim / tp

    def kept_by_i(self, tp: int = 1) -> float:
        """Deferred gradients from I to W: x and dY of all products. q, k and v share an x, as do gate and up. TP does
        not cut these two x, nor dY of out and down."""
        return 4 * self.dim + (2 * self.queries + self.keys_and_values + 3 * self.hidden) / tp

    def working(self, checkpointing: Checkpointing | str, kind: OpKind, tp: int = 1) -> float:
        """Working memory of an op in eager mode, beyond what it adds (`CostModel.working`), in the feed-forward layer.

        - F: both summands of the result. With checkpointing also x, the activated gate, up and their product.
        - B: the saved tensors of one recomputed block, and gradients of the result, of the activated gate and of up.
        - I: as for B, plus the product, which W needs later, less the deferred gradients of blocks already passed.
        - W: only gradients of weights.
        """
        checkpointing = Checkpointing.parse(checkpointing)
        kept, saved = self.kept_by_f(checkpointing, tp), self.kept_by_f(Checkpointing.NONE, tp)
        hidden = self.hidden / tp
        match kind:
            case OpKind.F if checkpointing is Checkpointing.NONE:
                return 2 * self.dim
            case OpKind.F:
                return 3 * hidden + self.dim * (2 if checkpointing is Checkpointing.FULL else 1)
            case OpKind.I:
                return saved + 3 * hidden + self.dim - max(kept, self.kept_by_i(tp))
            case OpKind.B:
                return saved + 2 * hidden + self.dim - kept
            case _:
                return 0.0

    def traffic(self, checkpointing: Checkpointing | str, compiled: bool = True) -> tuple[float, float]:
        """Elements that F and I read and write outside products and attention: in norms with the sums before them,
        rotary embeddings, and the activation function. I also reads the gradients, and repeats what checkpointing
        dropped. Without a compiler these are several kernels each, with copies in float32.
        """
        rotated = 2 * (self.queries + self.keys_and_values / 2)
        in_f = 2 * 4 * self.dim + rotated + 3 * self.hidden
        in_i = 2 * 5 * self.dim + rotated + 5 * self.hidden
        again = Checkpointing.parse(checkpointing) is not Checkpointing.NONE
        unfused = 1.0 if compiled else _UNFUSED
        return unfused * in_f, unfused * (in_i + again * in_f)

    def recomputed(self, checkpointing: Checkpointing | str) -> float:
        """Share of F's floating-point operations that I repeats. Causal attention costs half."""
        attention = _SEQ_LEN * self.queries
        products = self.dim * (2 * self.queries + self.keys_and_values + 3 * self.hidden)
        match Checkpointing.parse(checkpointing):
            case Checkpointing.NONE:
                return 0.0
            case Checkpointing.SELECTIVE:
                keys = 0.0 if self.fused_qkv else self.keys_and_values / 2
                return self.dim * (self.queries + keys + self.hidden) / (products + attention)
            case Checkpointing.FULL:
                return 1.0


LLAMA_3_8B = Block(dim=4096, queries=4096, keys_and_values=2048, hidden=14336)


def typical_times(checkpointing: Checkpointing | str) -> tuple[float, ...]:
    """Times of F, I and W relative to F: those of the paper, with recomputation added to I.

    >>> typical_times("full")
    (1.0, 1.99, 0.67)
    """
    f, i, w = PAPERS_TIMES
    return f, i + f * LLAMA_3_8B.recomputed(checkpointing), w


def typical_costs(
    placement: Placement,
    checkpointing: Checkpointing | str = "selective",
    *,
    times: Sequence[float] | None = None,
    comm: float = 0.0,
    host: Link | None = None,
    tensor: int = 1,
    waits: Sequence[float] = (0.0, 0.0),
) -> CostModel:
    """Costs of a model of eight Llama 3 8B blocks per rank, without embedding and head, on this placement.

    The unit of memory is the activations of one microbatch on one rank under this checkpointing.

        >>> costs = typical_costs(Placement.v(4), "full")
        >>> costs.of(0, OpKind.W).frees / costs.activations[0]
        17.0

    `times`: seconds of F, I and W of one microbatch on a rank (default: `typical_times`). `comm`: seconds of a
    message. `tensor`: degree of TP. `waits`: shares of F and of I that wait for collectives. `host`: a link with
    bandwidth in this unit of memory per second.
    """
    checkpointing = Checkpointing.parse(checkpointing)
    block, kept = LLAMA_3_8B, LLAMA_3_8B.kept_by_f(checkpointing, tensor)
    times = typical_times(checkpointing) if times is None else tuple(times)
    if len(times) != 3:
        raise ValueError(f"times = {times} are not three numbers: give those of F, I and W, for example (1, 1.2, 0.8)")
    working = {kind: block.working(checkpointing, kind, tensor) / (_BLOCKS_PER_RANK * kept) for kind in COMPUTATIONS}
    freed = 1 - block.kept_by_i(tensor) / kept
    costs = CostModel.uniform(placement, *times, comm=comm, freed_by_i=freed, working=working, host=host)
    parts = zip((OpKind.F, OpKind.I), (costs.f, costs.i), waits, strict=True)
    return replace(costs, waits={kind: tuple(part * each for each in own) for kind, own, part in parts if part})


def usual_costs(
    placement: Placement, checkpointing: Checkpointing, tensor: int = 1, work: Work | None = None
) -> CostModel:
    """Default costs for a schedule that adapts to the checkpointing, in a job without measured costs.

    F takes one second on the average rank. `work` is the work of each stage; by default all stages are equal.

    >>> usual_costs(Placement.loop(2), Checkpointing.FULL, work=[(3, 6, 2), (1, 1, 1)]).i
    (3.0, 0.5)
    """
    costs = typical_costs(placement, checkpointing, comm=_COMM, tensor=tensor)
    if work is None or not sum(f for f, *_ in work):
        return costs
    unit = placement.num_ranks / sum(f for f, *_ in work)
    f, i, w = (tuple(unit * each for each in times) for times in zip(*work, strict=True))
    return replace(costs, f=f, i=i, w=w)


def has_torchs_split(schedule: Schedule, source: str) -> bool:
    """Whether torch splits the backwards of a schedule whose class comes from `source`."""
    return source == "torch" and OpKind.I in schedule.kinds


def runs_torchs_split(checkpointing: Checkpointing | None, compiled: bool = False) -> bool:
    """Whether torch's split can run, as fast as simulated. False if the checkpointing is unknown.

    >>> [runs_torchs_split(each) for each in Checkpointing]
    [True, False, False]
    """
    return checkpointing is Checkpointing.NONE and not compiled
