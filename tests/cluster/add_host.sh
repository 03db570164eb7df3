#!/usr/bin/env bash
# On the head: start a host and connect it with the bridge.
#   add_host.sh FOLDER NAME ADDRESS "slurm" or "" UNSHARE
set -euo pipefail
folder=$1 name=$2 address=$3 slurm=$4 unshare=$5
host=${0%/*}/host.sh

ip link delete "$name" 2>/dev/null || true
# shellcheck disable=SC2086 # UNSHARE is a command with its options
setsid $unshare "$host" "$folder" "$name" "$address" "$slurm" \
  </dev/null >>"$folder/$name.log" 2>&1 &
until child=$(pgrep -P $!) && [ -n "$child" ]; do sleep 0.02; done
echo "$child" >"$folder/$name.pid"
# Use the same hardware address each time; other hosts would keep writing to the one they know.
hardware=$(printf '02:00:00:00:00:%02x' "${address##*.}")
ip link add "$name" type veth peer name eth0 address "$hardware" netns "$child"
ip link set "$name" master bridge0 up
