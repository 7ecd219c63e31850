#!/usr/bin/env bash
# `srun -n 2` with packaging/hosts/rank.sh, on two nodes of Slurm that are this machine: a
# controller and two daemons, without systemd. By hand, as root: it needs Debian's slurmctld,
# slurmd, slurm-client and munge, and the hierarchies of cgroups v1. Starts munged if none runs, and
# ends what it has started. Env: NETMEM (the command). Arguments: those of `netmem perf --to`.
set -euo pipefail
tree=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
export PATH=$PATH:/usr/sbin:/sbin
for program in slurmctld slurmd srun sinfo munged; do
    command -v $program > /dev/null || { echo "skipped: $program is not installed (on Debian: slurmctld, slurmd, slurm-client, munge)"; exit; }
done
[[ $EUID == 0 ]] || { echo "skipped: not root"; exit; }
dir=$(mktemp -d)
started=()
finish() {
    ((${#started[@]} == 0)) || kill "${started[@]}" 2> /dev/null || true
    wait
    rm -rf "$dir"
}
trap finish EXIT

if ! munge -n > /dev/null 2>&1; then
    install -d -o munge -g munge /run/munge
    runuser -u munge -- munged --foreground --force > "$dir/munged.log" 2>&1 &
    started+=($!)
fi
cat > "$dir/slurm.conf" <<CONF
ClusterName=netmem
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort=16817
SlurmUser=root
SlurmdUser=root
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool-%n
SlurmctldLogFile=$dir/controller.log
SlurmdLogFile=$dir/%n.log
SlurmctldPidFile=$dir/controller.pid
SlurmdPidFile=$dir/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
NodeName=one NodeHostname=$(hostname) NodeAddr=127.0.0.1 Port=16818
NodeName=two NodeHostname=$(hostname) NodeAddr=127.0.0.1 Port=16819
PartitionName=all Nodes=one,two Default=YES
CONF
# Without a plugin for cgroups, slurmd does not start; the one for v2 needs systemd.
echo "CgroupPlugin=cgroup/v1" > "$dir/cgroup.conf"
mkdir "$dir/state"
export SLURM_CONF=$dir/slurm.conf
slurmctld -D > /dev/null 2>&1 &
started+=($!)
for node in one two; do
    slurmd -D -N $node > /dev/null 2>&1 &
    started+=($!)
done
for ((n = 0; n < 100; n++)); do
    [[ $(sinfo --noheader --states=idle --format=%D 2> /dev/null) != 2 ]] || break
    sleep 0.2
done
[[ $(sinfo --noheader --states=idle --format=%D) == 2 ]] || { tail -n 5 "$dir"/*.log >&2; exit 1; }

ln -s "${NETMEM:-$tree/target/release/netmem}" "$dir/netmem"
(umask 077 && head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n' > "$dir/key")
export PATH=$dir:$PATH NETMEM_KEY=$dir/key NETMEM_HOSTS=127.0.0.1,127.0.0.1
srun --nodes 2 --ntasks 2 "$tree/packaging/hosts/rank.sh" "${@:---runs=1}"
