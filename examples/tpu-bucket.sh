#!/bin/bash
# A training on a TPU slice of several machines that uses only a bucket: data and run are in it, no folder is shared.
#
#   TPU=my-v4-32 ZONE=us-central2-b BUCKET=gs://my-bucket examples/tpu-bucket.sh resnet50-imagenet-32k
#
# The data is in BUCKET/imagenet, the run in BUCKET/runs/NAME (NAME=one). The service account of the slice needs the role
# Storage Object User on the bucket. A preempted slice that comes back, or another one, goes on by the same command.
set -eu
places="--data.path ${BUCKET@Q}/imagenet --run ${BUCKET@Q}/runs/${NAME:-one}"
exec gcloud compute tpus tpu-vm ssh "$TPU" --zone "$ZONE" --worker all --command "podscale train ${*@Q} $places"
