#!/bin/bash
# A training on a TPU slice of several machines: the same command on each of them; they find each other by themselves.
#
#   TPU=my-v4-32 ZONE=us-central2-b examples/tpu-vm.sh resnet50-imagenet-32k --data.path /mnt/data --run /mnt/runs/one
#
# The run's folder must be one that all machines see. A preempted slice that comes back goes on by the same command.
set -eu
exec gcloud compute tpus tpu-vm ssh "$TPU" --zone "$ZONE" --worker all --command "podscale train ${*@Q}"
