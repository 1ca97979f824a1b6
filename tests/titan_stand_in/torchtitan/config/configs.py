"""The fields that zbpipe reads."""

from dataclasses import dataclass, field


@dataclass
class ParallelismConfig:
    pipeline_parallel_degree: int = 1
    pipeline_parallel_schedule: str = "1F1B"
    pipeline_parallel_schedule_csv: str | None = ""
    pipeline_parallel_layers_per_stage: int | None = None
    pipeline_parallel_first_stage_less_layers: int = 1
    pipeline_parallel_last_stage_less_layers: int = 1
    num_pp_microbatches: int = 1
    module_fqns_per_model_part: list[list[str]] | None = None
    tensor_parallel_degree: int = 1
    context_parallel_degree: int = 1
    expert_parallel_degree: int = 1
    data_parallel_replicate_degree: int = 1
    data_parallel_shard_degree: int = -1


@dataclass
class TrainingConfig:
    steps: int = 2
    num_tokens_per_microbatch_per_dp_rank: int = 8
    num_tokens_per_train_step: int = -1
    max_context_length: int = 8
    max_norm: float = 1.0
    disable_cuda_graphs: bool = False


@dataclass
class CompileConfig:
    enable: bool = False


@dataclass
class CommConfig:
    mode: str = "default"
    init_timeout_seconds: int = 300


@dataclass
class JobFields:
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    comm: CommConfig = field(default_factory=CommConfig)
