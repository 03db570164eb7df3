#!/usr/bin/env bash
# A long run as jobs one after the other, where requeueing is not allowed or queues are short.
#   slurm/chain.sh 5 RECIPE [--set training.steps=100000]
# All have the same name, and of these Slurm runs one at a time (`singleton`); each goes on where the
# one before has saved, and those after the last step end at once.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
jobs=${1:?how many jobs: slurm/chain.sh 5 RECIPE}
if ! [[ $jobs =~ ^[1-9][0-9]*$ ]]; then
  echo "$jobs is no number of jobs: slurm/chain.sh 5 RECIPE" >&2
  exit 2
fi
shift
: "${1:?name a recipe: slurm/chain.sh 5 RECIPE}"

options=$(.venv/bin/python slurm/options.py "$@")
RESUME_ONCE=chain-$(date +%s)-$$ # the first job to start carries out --resume
for _ in $(seq "$jobs"); do
  # shellcheck disable=SC2086 # several options, none with a space
  REQUEUE=no RESUME_ONCE=$RESUME_ONCE \
    sbatch $options --no-requeue --dependency=singleton slurm/pretrain.slurm "$@"
done
