"""Measure this machine: the training step, the input, gradient summation, and each part alone (`doctor`)."""
