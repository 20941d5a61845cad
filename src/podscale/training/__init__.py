"""Training: setup, the step, the loop, evaluation, checkpoints, and faults."""
