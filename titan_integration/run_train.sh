#!/usr/bin/env bash
# Trains with TorchTitan and zbpipe's schedules on this node, or as this node's part of a job on several.
#
#   NGPU=8 CONFIG=llama3_8b titan_integration/run_train.sh --training.steps 100
#
# Arguments go on to the trainer, after this script's own. Variables:
#
#   NGPU         processes on this node, one a GPU (default: 8; on a CPU 2)
#   MODULE       TorchTitan's --module (default: titan_integration.llama3); not with TorchTitan 0.2
#   CONFIG       TorchTitan's --config, a function in it (default: llama3_debug). With TorchTitan 0.2 a TOML file: its
#                path, or its name in titan_integration/titan02 without the ending
#   LOG_RANK     whose output is shown, numbers on this node separated by commas (default: 0; all ranks log the loss)
#   LOG_DIR      folder for the output of all processes, in files (default: a folder of torchrun's in /tmp)
#   TRAIN_FILE   Python module to run (default: zbpipe.titan.train)
#   PLATFORM     cuda, rocm, cpu, or auto (default): what torch finds
#   COMM_MODE    fake_backend or local_tensor: one process that stands for rank RANK (default: 0) of NGPU, one step
#   TORCHFT_LIGHTHOUSE  handed on to TorchTitan's torchft experiment
#   PYTHON       interpreter (default: python3)
#   DRY_RUN      1: print environment and command instead of starting
#
# For several nodes, on each of them (under srun with one task a node, Slurm's variables are the defaults):
#
#   NNODES       nodes (default: 1)
#   NODE_RANK    which of them this is, from 0
#   MASTER_ADDR  name or address of node 0
#   MASTER_PORT  a free port there, the same on all nodes (default: 29500; under Slurm by the job's number)
#
# Whatever this script sets in the environment for a platform is a default: what is set already stays.
set -euo pipefail

fail() {
    echo "run_train.sh: $*" >&2
    exit 2
}

require_number() { # NAME LEAST MOST
    local value=${!1}
    if ! [[ $value =~ ^(0|[1-9][0-9]{0,8})$ ]] || ((value < $2 || value > $3)); then
        fail "$1='$value' has to be a whole number from $2 to $3"
    fi
}

in_environment=()
default() { # NAME VALUE
    export "$1=${!1-$2}"
    in_environment+=("$1")
}

PLATFORM=${PLATFORM:-auto}
[[ $PLATFORM =~ ^(auto|cuda|rocm|cpu)$ ]] ||
    fail "PLATFORM='$PLATFORM' is unknown: use cuda, rocm or cpu, or omit it to take what torch finds"
COMM_MODE=${COMM_MODE:-}
[[ $COMM_MODE =~ ^(fake_backend|local_tensor)?$ ]] ||
    fail "COMM_MODE='$COMM_MODE' is unknown: use fake_backend or local_tensor, or omit it to train"
CONFIG=${CONFIG:-llama3_debug}
TRAIN_FILE=${TRAIN_FILE:-zbpipe.titan.train}
export LOG_RANK=${LOG_RANK:-0} # TorchTitan looks there, too
[[ $LOG_RANK =~ ^[0-9]+(,[0-9]+)*$ ]] || fail "LOG_RANK='$LOG_RANK' has to be numbers separated by commas, such as 0,1"
PYTHON=${PYTHON:-python3}
command -v "$PYTHON" >/dev/null || fail "PYTHON='$PYTHON' is not there: activate your environment, or set PYTHON to an interpreter"

# MODULE is found in this repository from wherever the script is started.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
in_environment+=(PYTHONPATH)

# Says what is missing, and which platform it is and how many GPUs. torch is imported only if it is asked something.
found=$("$PYTHON" - "$PLATFORM" "${MODULE:-}" "$TRAIN_FILE" "${DRY_RUN:-0}" <<'PYTHON_CODE'
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

platform, module, train_file, dry_run = sys.argv[1:]


def fail(message: str) -> None:
    sys.exit(f"run_train.sh: {message}")


def is_there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


for package, way_out in {
    "torch": "install the build for this platform first; titan_integration/README.md says how",
    "torchtitan": "pip install 'torchtitan>=0.2.2,<0.4'",
    "zbpipe": "pip install '.[titan]' in the clone of zbpipe",
}.items():
    if not is_there(package):
        fail(f"{sys.executable} has no module {package}: {way_out}")
try:
    installed, titan = version("torch"), ".".join(version("torchtitan").split(".")[:2])
except PackageNotFoundError as error:
    fail(f"{error.name} is in Python's path, but not installed: pip install --no-deps --editable, and its folder")
oldest = 11 if titan == "0.2" else 14
if tuple(int(part) for part in installed.split(".")[:2]) < (2, oldest):
    fail(
        f"torch {installed} is too old for TorchTitan {titan}, which needs 2.{oldest} or newer:"
        " titan_integration/README.md says how"
    )
if titan == "0.2" and module:
    fail(f"MODULE='{module}' is for TorchTitan 0.3, and this is {titan}: omit it, and set CONFIG to a TOML file")
for variable, name in (("MODULE", module), ("TRAIN_FILE", train_file)):
    if "." in name and not is_there(name):
        fail(f"{variable}='{name}' is no Python module: put its folder into PYTHONPATH, or correct the name")
gpus = "any"
if platform == "auto" or (platform != "cpu" and dry_run != "1"):
    import torch

    gpus = str(torch.cuda.device_count())
    found = "cpu" if not torch.cuda.is_available() else "rocm" if torch.version.hip else "cuda"
    if platform not in ("auto", found):
        build = "ROCm" if torch.version.hip else "CUDA" if torch.version.cuda else "CPU"
        fail(
            f"PLATFORM={platform}, but torch {installed} is a {build} build that sees {gpus} GPUs:"
            f" install the build for {platform}, look why its driver is not seen, or use PLATFORM={found}"
        )
    platform = found
config = Path(str(find_spec("torch").origin)).with_name("distributed") / "config.py"
has_edges = config.is_file() and "TORCH_DISTRIBUTED_PIPELINE_PER_EDGE_P2P" in config.read_text()
print(platform, "any" if platform == "cpu" else gpus, titan, int(has_edges))
PYTHON_CODE
) || exit 2
read -r PLATFORM gpus titan has_edges <<<"$found"

if [[ $titan == 0.2 ]]; then
    file=$CONFIG
    [[ -f $file ]] || file=$root/titan_integration/titan02/$CONFIG.toml
    [[ -f $file ]] || fail "CONFIG='$CONFIG' is neither a TOML file nor the name of one in titan_integration/titan02"
    config=(--job.config_file "$file")
else
    config=(--module "${MODULE:-titan_integration.llama3}" --config "$CONFIG")
fi

NGPU=${NGPU:-$([[ $PLATFORM == cpu ]] && echo 2 || echo 8)}
require_number NGPU 1 1000000
if [[ -z $COMM_MODE && $gpus != any ]] && ((NGPU > gpus)); then
    fail "NGPU='$NGPU', but torch sees $gpus GPUs: use NGPU=$gpus, or look why the others are not seen"
fi

if [[ -z ${NNODES:-}${SLURM_STEP_NUM_NODES:-} ]] && ((${SLURM_JOB_NUM_NODES:-1} > 1)); then
    fail "SLURM_JOB_NUM_NODES='$SLURM_JOB_NUM_NODES', but without srun this trains on one node: put srun before the command, or set NNODES=1"
fi
if [[ -z $COMM_MODE && -z ${NNODES:-}${SLURM_STEP_NUM_NODES:-} && -n ${NODE_RANK:-}${MASTER_ADDR:-} ]]; then
    fail "NODE_RANK='${NODE_RANK:-}' and MASTER_ADDR='${MASTER_ADDR:-}' are of several nodes: set NNODES, too, or leave them out"
fi
NNODES=${NNODES:-${SLURM_STEP_NUM_NODES:-1}}
require_number NNODES 1 100000
if [[ -z $COMM_MODE ]] && ((NNODES > 1)); then
    if [[ -n ${SLURM_STEP_NUM_NODES:-} ]]; then
        ((${SLURM_STEP_NUM_TASKS:-$NNODES} == NNODES)) ||
            fail "srun started SLURM_STEP_NUM_TASKS='$SLURM_STEP_NUM_TASKS' tasks on $NNODES nodes: use --ntasks-per-node=1, torchrun starts the GPUs' processes"
        NODE_RANK=${NODE_RANK:-${SLURM_NODEID:-}}
        [[ -n ${MASTER_ADDR:-} ]] || command -v scontrol >/dev/null ||
            fail "scontrol is not there to name node 0 of SLURM_STEP_NODELIST='${SLURM_STEP_NODELIST:-}': set MASTER_ADDR"
        MASTER_ADDR=${MASTER_ADDR:-$(scontrol show hostnames "${SLURM_STEP_NODELIST:-}" | head -n 1)}
        MASTER_PORT=${MASTER_PORT:-$((20000 + ${SLURM_JOB_ID:-0} % 10000))}
    fi
    [[ -n ${MASTER_ADDR:-} ]] || fail "NNODES='$NNODES' needs MASTER_ADDR: set it to the name or address of node 0, the same on all nodes"
    [[ -n ${NODE_RANK:-} ]] || fail "NNODES='$NNODES' needs NODE_RANK: set it to 0 on the node MASTER_ADDR, and to 1, 2, ... on the others"
    require_number NODE_RANK 0 $((NNODES - 1))
    MASTER_PORT=${MASTER_PORT:-29500}
    require_number MASTER_PORT 1 65535
    # Not the c10d rendezvous: it numbers the nodes itself, and TP and the pipeline count on neighbours.
    rendezvous=(--nnodes "$NNODES" --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT")
else
    rendezvous=(--standalone) # on a port that the system chooses
fi

case $PLATFORM in
rocm)
    default GPU_MAX_HW_QUEUES 2
    default TORCH_NCCL_HIGH_PRIORITY 1
    default HSA_NO_SCRATCH_RECLAIM 1
    default HSA_ENABLE_SDMA 1
    default NCCL_CHECKS_DISABLE 1
    default NCCL_CROSS_NIC 0
    default NCCL_PXN_DISABLE 1
    default NCCL_P2P_NET_CHUNKSIZE 524288
    default NCCL_IB_GID_INDEX 3 # 1 on some RoCEv2 networks; `show_gids` tells
    ;;
cuda)
    default PYTORCH_ALLOC_CONF expandable_segments:True
    # A queue for each neighbour and direction: in one for all, a message that waits holds up those behind it. Not on
    # ROCm, where every queue more has to share the few hardware queues with the computations.
    if [[ $has_edges == 1 ]]; then default TORCH_DISTRIBUTED_PIPELINE_PER_EDGE_P2P 1; fi
    ;;
cpu)
    # Also where there are GPUs.
    export CUDA_VISIBLE_DEVICES="" HIP_VISIBLE_DEVICES=""
    in_environment+=(CUDA_VISIBLE_DEVICES HIP_VISIBLE_DEVICES)
    cores=$(getconf _NPROCESSORS_ONLN)
    default OMP_NUM_THREADS $((cores > NGPU ? cores / NGPU : 1))
    ;;
esac
if [[ -n ${TORCHFT_LIGHTHOUSE:-} ]]; then default TORCHFT_LIGHTHOUSE ""; fi

trainer=("$TRAIN_FILE" "${config[@]}")
if [[ -n $COMM_MODE ]]; then
    export NGPU LOCAL_RANK=0
    in_environment+=(NGPU LOCAL_RANK)
    command=("$PYTHON" -m "${trainer[@]}" --comm.mode "$COMM_MODE" --training.steps 1 "$@")
else
    command=(
        "$PYTHON" -m torch.distributed.run --nproc-per-node "$NGPU" "${rendezvous[@]}"
        --local-ranks-filter "$LOG_RANK" ${LOG_DIR:+--log-dir "$LOG_DIR"} --role rank --tee 3 -m "${trainer[@]}" "$@"
    )
fi

if [[ ${DRY_RUN:-0} == 1 ]]; then
    echo "PLATFORM=$PLATFORM"
    for name in "${in_environment[@]}"; do echo "$name=${!name}"; done
    printf '%q ' "${command[@]}"
    echo
    exit
fi
exec "${command[@]}"
