#!/usr/bin/env bash
# A study as one Slurm job: Ray starts on every node of the job, the study runs on the first, and both end with the job.
#
#   sbatch clusters/slurm.sh weak --out results/slurm        the arguments are those of `run`
#
# Submit it from the project's folder on a file system that all nodes share, with .venv created there (`make study`).
#SBATCH --job-name=scaling-study
#SBATCH --nodes=2
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --time=04:00:00
#SBATCH --signal=B:TERM@120
set -euo pipefail
cd "$SLURM_SUBMIT_DIR"
umask 077 # if this script creates the token, only its user can read it

export PATH="$PWD/.venv/bin:$PATH" RAY_AUTH_MODE=token RAY_worker_niceness=0 RAY_USAGE_STATS_ENABLED=0
[[ -s ~/.ray/auth_token ]] || ray get-auth-token --generate >/dev/null

read -r head < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
read -r head_address _ < <(srun --nodes=1 --ntasks=1 --nodelist="$head" hostname --ip-address)
address=$head_address:$((20000 + SLURM_JOB_ID % 20000)) # jobs that share a node use different ports

trap 'kill -TERM "$step"; wait "$step"' TERM # sent before the time limit, so that the study ends with a partial report
srun ray symmetric-run --address "$address" --min-nodes "$SLURM_JOB_NUM_NODES" \
    --num-cpus "$SLURM_CPUS_PER_TASK" --num-gpus "${SLURM_GPUS_ON_NODE:-0}" \
    -- python -m study.scaling run --address "$address" "$@" &
step=$!
wait "$step"
