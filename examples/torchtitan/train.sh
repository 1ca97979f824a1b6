#!/usr/bin/env bash
# Trains TorchTitan's Llama 3 debug model with ZB on 2 processes, with or without GPUs, and without any download:
#
#   examples/torchtitan/train.sh --training.steps 20
#
# A job of your own needs two changes: zbpipe.titan.train in place of torchtitan.train, and ZB as its schedule.
# It keeps its own --module and --config. Ready configs for 8B, 70B and 405B: titan_integration/README.md.
set -euo pipefail
exec torchrun --standalone --nproc-per-node 2 --local-ranks-filter 0 --role rank --tee 3 -m zbpipe.titan.train \
    --module zbpipe.cli.demo.models03 --config llama3_python_stdlib \
    --parallelism.pipeline_parallel_degree 2 --parallelism.pipeline_parallel_schedule ZB \
    --training.local_batch_size 8 --training.disable_cuda_graphs --training.steps 10 "$@"
