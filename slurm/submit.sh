#!/usr/bin/env bash
# Submit a recipe to Slurm, with the nodes and GPUs of its [cluster] section.
#   slurm/submit.sh RECIPE [options of pretrain.py, such as --set training.steps=100000]
#   slurm/submit.sh --jobs 5 RECIPE [...]
#   slurm/submit.sh --elastic RECIPE [...]
# With --jobs, the run is divided into jobs that Slurm starts one after the other. Use it on
# clusters that do not allow requeueing or have short time limits. Each job resumes from the newest
# checkpoint. If the last step is done before the last job, the remaining jobs end at once.
#
# With --elastic, the job survives the death of nodes: recipes/launch.py continues the run on the
# remaining nodes. The job requests cluster.spare_nodes nodes in addition.
#
# Set the options that a recipe does not know, such as the account and the time limit, once at the top
# of slurm/pretrain.slurm, or in sbatch's variables SBATCH_ACCOUNT, SBATCH_PARTITION, SBATCH_TIMELIMIT.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
usage="usage: slurm/submit.sh [--jobs 5 | --elastic] RECIPE [--set training.steps=1000] [...]"

fail() {
  echo "submit.sh: $1" >&2
  exit 2
}

jobs=
elastic=()
case "${1:-}" in
  --elastic)
    jobs=1
    elastic=(--elastic)
    shift
    ;;
  --jobs)
    jobs=${2:-}
    shift "$(($# < 2 ? $# : 2))"
    ;;
  --jobs=*)
    jobs=${1#--jobs=}
    shift
    ;;
  *) jobs=1 ;;
esac
for word in "$@"; do
  case $word in
    -h | --help)
      echo "$usage"
      exit 0
      ;;
  esac
done
if ! [[ $jobs =~ ^[1-9][0-9]{0,2}$ ]]; then
  fail "invalid --jobs ${jobs:-(no value)}: expected 1 to 999, for example --jobs 5"
fi
if [ "$#" -eq 0 ] || [[ $1 == -* ]]; then
  fail "expected a recipe${1:+ instead of $1}, for example recipes/llama/7b.toml; $usage"
fi
for word in "${@:2}"; do
  case $word in
    --elastic | --jobs | --jobs=*) fail "$word comes after the recipe; write it before: $usage" ;;
  esac
done

if [ -n "${CONTAINER:-}" ] && [ "${#elastic[@]}" -gt 0 ] && ! [ -x .venv/bin/python ]; then
  fail ".venv does not exist, and with --elastic, launch.py runs outside of CONTAINER; run make setup first"
fi
if [ -n "${CONTAINER:-}" ]; then # pretrain.slurm runs in the same image
  python=(apptainer exec "$CONTAINER" python)
  command -v apptainer >/dev/null || fail "CONTAINER is set but apptainer is not on PATH"
  [ -e "$CONTAINER" ] || fail "CONTAINER=$CONTAINER does not exist; see slurm/container/threefold.def"
else
  python=(.venv/bin/python)
  [ -x .venv/bin/python ] || fail ".venv does not exist; run make setup first"
fi
options=$("${python[@]}" slurm/options.py "${elastic[@]}" "$@") # rejects a recipe that cannot run on its [cluster]
command -v sbatch >/dev/null || fail "sbatch is not on PATH; run this on a login node of the cluster"

if [ "${#elastic[@]}" -gt 0 ]; then
  export ELASTIC=yes
fi
# Some clusters set SBATCH_EXPORT=NONE, and the job would not get ELASTIC, REQUEUE, RESUME_ONCE,
# RANK_LOGS and CONTAINER.
case ",${SBATCH_EXPORT:-NONE}," in
  ,NONE, | ,NIL,) exported=ALL ;;
  *,ALL,*) exported=$SBATCH_EXPORT ;;
  *) exported=ALL,$SBATCH_EXPORT ;;
esac
if [ "$jobs" -eq 1 ]; then
  # shellcheck disable=SC2086 # several options, none with a space
  exec sbatch $options "--export=$exported" slurm/pretrain.slurm "$@"
fi
# All jobs have the same name, and `singleton` lets Slurm run one job of a name at a time. Only the
# first job to start applies --resume; the others resume from the newest checkpoint.
RESUME_ONCE=chain-$(date +%s)-$$
export RESUME_ONCE REQUEUE=no
for _ in $(seq "$jobs"); do
  # shellcheck disable=SC2086 # several options, none with a space
  sbatch $options "--export=$exported" --no-requeue --dependency=singleton slurm/pretrain.slurm "$@"
done
