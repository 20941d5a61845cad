"""Training: set-up, the step, the loop, evaluation, checkpoints, and what can go wrong."""
