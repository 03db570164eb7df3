#!/usr/bin/env bash
# The head of a cluster, first process of its namespaces: a bridge, ssh and Slurm if munge has a key.
#   head.sh FOLDER NETWORK
set -euo pipefail
folder=$1 network=$2

hostname head
ip link set lo up
mount --bind "$folder/hosts" /etc/hosts
if [ ! -e "$folder/munge.key" ]; then
  touch "$folder/head.ready"
  exec "$BASH" -c 'while :; do sleep 3600 & wait $!; done'
fi
mount --bind "$folder/ssh_config" /etc/ssh/ssh_config
mount -t tmpfs tmpfs /run
ip link add bridge0 type bridge
ip address add "$network.254/24" dev bridge0
ip link set bridge0 up
munged --force --key-file="$folder/munge.key" --socket="$folder/munge.socket" \
  --pid-file="$folder/munged.pid" --log-file="$folder/munged.log" --seed-file="$folder/munged.seed"
slurmctld -f "$folder/slurm.conf"
touch "$folder/head.ready"
while :; do
  sleep 3600 & # a shell in `wait` takes in the processes whose parents are gone
  wait $!
done
