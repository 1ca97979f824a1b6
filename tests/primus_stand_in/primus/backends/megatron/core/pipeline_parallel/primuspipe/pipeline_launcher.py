"""What Primus' launcher (commit fd1eeab) asserts of the names of schedules."""

from megatron.core import parallel_state
from megatron.training import get_args


class PrimusPipelineParallelLauncher:
    def __init__(self) -> None:
        self.pp_size = parallel_state.get_pipeline_model_parallel_world_size()
        self.vpp_size = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
        self.pp_algorithm = get_args().pp_algorithm
        assert self.pp_algorithm in ("1f1b", "1f1b-interleaved", "zero-bubble", "zbv-formatted")
        assert self.pp_algorithm not in ("1f1b", "zero-bubble") or self.vpp_size == 1
        assert self.pp_algorithm != "zbv-formatted" or self.vpp_size == 2
