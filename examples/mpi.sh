#!/bin/bash
# A training under Open MPI. One process a GPU (or a host); they find each other by themselves.
#
#   MPIRUN="mpirun -n 32 --hostfile HOSTS" examples/mpi.sh resnet50-imagenet-32k --data.path DATA
#
# MPI only starts the processes. Sums go through NCCL on GPUs and Gloo on CPUs, over the network that these choose.
# After exit code 69, 70 or 75 the same command goes on from the last checkpoint; this script starts it again.
# If a process is killed, mpirun names it and ends with 128 + the signal; this script ends with 69, as the others would.
MOST_RESTARTS=${MOST_RESTARTS:-3}
# The processes show each other that they are of this job: see docs/launch.md.
export PODSCALE_JOB_SECRET=${PODSCALE_JOB_SECRET:-$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n')}

for ((try = 0; ; try++)); do
    ${MPIRUN:-mpirun} --bind-to none -x PODSCALE_JOB_SECRET podscale train "$@"
    code=$?
    case $code in
        0 | 1 | 2 | 65 | 130) exit $code ;; # done; a bug; a mistake; no numbers; interrupted: the same again is no help
    esac
    if [ "$code" -gt 128 ]; then
        code=69
    fi
    if [ "$try" -ge "$MOST_RESTARTS" ]; then
        exit $code
    fi
    echo "exit code $code: starting again ($((try + 1)) of $MOST_RESTARTS)" >&2
done
