"""Podscale: train image classifiers at supercomputer scale, and on one machine, with the same recipe."""
