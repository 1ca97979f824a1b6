from megatron.training.global_vars import get_args as get_args
