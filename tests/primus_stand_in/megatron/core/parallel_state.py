"""Megatron's parallel state: the pipeline."""

from types import SimpleNamespace

pipeline = SimpleNamespace(group=None, stages_per_rank=1)


def get_pipeline_model_parallel_world_size() -> int:
    return int(pipeline.group.size())


def get_pipeline_model_parallel_rank() -> int:
    return int(pipeline.group.rank())


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    return pipeline.stages_per_rank if pipeline.stages_per_rank > 1 else None
