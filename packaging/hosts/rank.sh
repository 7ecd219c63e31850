#!/bin/sh
# One rank of a measurement between hosts, for mpirun, srun and Kubernetes: rank 0 drives, the
# others are agents, which end when it does. Its arguments are those of `netmem perf --to`.
#
#     NETMEM_HOSTS   names or addresses of the hosts, in the order of ranks, separated by commas
#     NETMEM_KEY     the file of the key that all share: (umask 077; openssl rand -hex 32 > FILE)
set -eu
: "${NETMEM_HOSTS:?}" "${NETMEM_KEY:?}"
rank=${OMPI_COMM_WORLD_RANK:-${SLURM_PROCID:-${JOB_COMPLETION_INDEX:?no launcher has set the number of this rank}}}
if [ "$rank" -gt 0 ]; then
    exec netmem perf --agent 0.0.0.0 --one-off --key "$NETMEM_KEY"
fi
exec netmem perf --to "${NETMEM_HOSTS#*,}" --key "$NETMEM_KEY" "$@"
