#!/usr/bin/env bash
# A host of a cluster, first process of its namespaces: its network, sshd, slurmd if asked for.
#   host.sh FOLDER NAME ADDRESS [slurm]
set -euo pipefail
folder=$1 name=$2 address=$3 slurm=$4

hostname "$name"
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /run
mkdir /run/sshd
# A command over ssh would read it, and it may wait, as pyenv does for a lock of another host.
if [ -e ~root/.bashrc ]; then
  mount --bind /dev/null ~root/.bashrc
fi
ip link set lo up
until ip link show eth0 >/dev/null 2>&1; do sleep 0.02; done
ip address add "$address/24" dev eth0
ip link set eth0 up
/usr/sbin/sshd -f "$folder/sshd_config"
if [ -n "$slurm" ]; then
  slurmd -f "$folder/slurm.conf" -N "$name"
fi
while :; do
  sleep 3600 &
  wait $!
done
