#!/bin/bash
# A training under Slurm. One task a GPU (or a node), each with its part of the pod; they find each other by themselves.
#
#   sbatch --nodes 4 --ntasks-per-node 8 --gpus-per-node 8 examples/slurm.sh resnet50-imagenet-32k --data.path DATA
#
# When the time is nearly up, or Slurm wants the nodes for another job, every task gets SIGTERM: all save the same step
# and end with code 75. The job then goes back to the queue and resumes. So it does after a fault of a node. If a task is
# killed, srun names it and ends with 128 + the signal; this script ends with 69, as the other tasks would.
#SBATCH --job-name=podscale
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=TERM@180

MOST_RESTARTS=${MOST_RESTARTS:-50}
# The tasks show each other that they are of this job: see docs/launch.md.
export PODSCALE_JOB_SECRET=${PODSCALE_JOB_SECRET:-$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n')}

srun --kill-on-bad-exit=1 podscale train "$@"
code=$?
case $code in
    0 | 1 | 2 | 65 | 130) exit $code ;; # done; a bug; a mistake; no numbers; interrupted: the same again is no help
esac
if [ "$code" -gt 128 ]; then
    code=69
fi
if [ "${SLURM_RESTART_COUNT:-0}" -lt "$MOST_RESTARTS" ]; then
    echo "exit code $code: back to the queue (restart $((${SLURM_RESTART_COUNT:-0} + 1)) of at most $MOST_RESTARTS)"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
