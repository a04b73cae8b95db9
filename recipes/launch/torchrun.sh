#!/usr/bin/env bash
# The recipe by torchrun, on one machine or many. Settings of the job go behind: torchrun.sh --learning_rate 2e-5
#   one machine:          recipes/launch/torchrun.sh
#   two, on each of them: NODES=2 NODE_RANK=0 HEAD=10.0.0.1 recipes/launch/torchrun.sh --hybrid_sharding true
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

GPUS=${GPUS:-$(nvidia-smi --list-gpus | wc -l)}   # of this machine, one process each
NODES=${NODES:-1}
NODE_RANK=${NODE_RANK:-0}
HEAD=${HEAD:-127.0.0.1}                           # address of the machine with NODE_RANK 0
PORT=${PORT:-29500}

# torchrun sets one OpenMP thread a process unless told; the tokenizing processes count for themselves.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
# After SIGTERM torchrun kills its ranks in 30 s unless told; a checkpoint of 161 GB takes longer.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-280}

exec torchrun --nnodes "$NODES" --nproc_per_node "$GPUS" --node_rank "$NODE_RANK" \
  --master_addr "$HEAD" --master_port "$PORT" \
  recipes/qwen27b_sft.py "$@"
