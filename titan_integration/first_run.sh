#!/usr/bin/env bash
# What a team with GPUs runs first: does everything work here, do the schedules agree, which is fastest, what does it keep?
#
#   titan_integration/first_run.sh                              # 8 GPUs: Llama 8B, no download, about an hour
#   PLATFORM=cpu titan_integration/first_run.sh                 # the debug model on 2 processes, under five minutes
#   CONFIG=llama3_8b titan_integration/first_run.sh --steps 50 -- --training.seq_len 4096
#
# It goes on after whatever fails, and writes one report, first_run/report.md, made to be sent back to zbpipe's authors.
# `--help` lists the options; what comes after `--` goes on to the trainer. The variables are those of run_train.sh.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" exec "${PYTHON:-python3}" -m titan_integration.first_run "$@"
