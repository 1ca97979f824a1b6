"""Megatron's arguments, as far as Primus' handlers read them."""

from types import SimpleNamespace

args = SimpleNamespace(
    communication_method="async_p2p", dump_pp_data=False, overlap_moe_expert_parallel_comm=False, pp_algorithm=""
)


def get_args() -> SimpleNamespace:
    return args
