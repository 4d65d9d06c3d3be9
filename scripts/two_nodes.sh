#!/usr/bin/env bash
# Two nodes on one machine: two Linux network namespaces, joined by a pair of virtual Ethernet devices, with nothing
# else in common than that wire. torchrun runs in each, as node 0 and node 1 of two.
#
#   sudo scripts/two_nodes.sh COMMAND...
#
# COMMAND is what follows the options of torchrun, for instance
#
#   sudo scripts/two_nodes.sh -m lightrft train --backend fsdp --model tiny --task copy --output /tmp/two-nodes
#
# Variables:
#   TORCHRUN        the launcher (default: torchrun); it may hold several words, as in "python -m torch.distributed.run"
#   NPROC_PER_NODE  ranks on each node (default: 1)
#   MASTER_PORT     where the nodes meet (default: 29500, which nobody else can have in a namespace of its own)
#   SUBNET          first three numbers of the addresses (default: 10.77.0)
#
# Exit code: 0 when both nodes ended well, else that of the first one that did not; 2 without a COMMAND; 77 where this
# machine cannot make namespaces. Namespaces, devices and every process inside are removed at the end, however it comes:
# Ctrl-C and TERM too. Only kill -9 of this script leaves them: remove them with `ip netns del`.
set -u

cannot() {
  echo "two_nodes: $1" >&2
  exit 77
}

[ $# -gt 0 ] || { sed -n '2,/^set -u/{/^set -u/!p}' "$0" | sed 's/^# \{0,1\}//' >&2; exit 2; }
command -v ip >/dev/null || cannot "the command 'ip' is missing: install iproute2."
[ "$(id -u)" = 0 ] || cannot "root rights are missing: 'ip netns' needs them. Start with sudo."

id=$$
nodes=("lrft$id-0" "lrft$id-1")
devices=("lrv$id-0" "lrv$id-1") # at most 15 characters
subnet=${SUBNET:-10.77.0}
read -r -a torchrun <<<"${TORCHRUN:-torchrun}"
launchers=()

# Whatever lives in the namespaces, told to end and then made to: torchrun starts its ranks in sessions of their own.
empty() {
  local node
  for signal in TERM KILL; do
    for _ in $(seq 50); do
      local left=""
      for node in "${nodes[@]}"; do left+=" $(ip netns pids "$node" 2>/dev/null | tr '\n' ' ')"; done
      [ -n "${left// /}" ] || return 0
      # shellcheck disable=SC2086  # a list of numbers
      kill "-$signal" $left 2>/dev/null
      sleep 0.1
    done
  done
}

tear_down() {
  trap '' INT TERM
  empty
  for node in "${nodes[@]}"; do ip netns del "$node" 2>/dev/null; done # the devices go with them
  ip link del "${devices[0]}" 2>/dev/null                              # where they never got into one
  wait
}
trap tear_down EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

for node in "${nodes[@]}"; do
  ip netns add "$node" || cannot "'ip netns add' failed: this machine, or its container, allows no network namespaces."
done
ip link add "${devices[0]}" type veth peer name "${devices[1]}" ||
  cannot "'ip link add ... type veth' failed: this kernel has no virtual Ethernet devices."
for n in 0 1; do
  ip link set "${devices[n]}" netns "${nodes[n]}" &&
    ip -n "${nodes[n]}" addr add "$subnet.$((n + 1))/24" dev "${devices[n]}" &&
    ip -n "${nodes[n]}" link set "${devices[n]}" up &&
    ip -n "${nodes[n]}" link set lo up || cannot "the device of node $n could not be set up."
done

for n in 0 1; do
  GLOO_SOCKET_IFNAME="${devices[n]}" NCCL_SOCKET_IFNAME="${devices[n]}" \
    ip netns exec "${nodes[n]}" "${torchrun[@]}" --nnodes 2 --node-rank "$n" --nproc-per-node "${NPROC_PER_NODE:-1}" \
    --master-addr "$subnet.1" --master-port "${MASTER_PORT:-29500}" "$@" &
  launchers+=($!)
done

# The first that fails ends it: the other node may wait for it without end.
code=0
for _ in "${launchers[@]}"; do
  wait -n || { code=$?; break; }
done
exit "$code"
