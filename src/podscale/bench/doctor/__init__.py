"""Measure what this machine can do, and find its bottleneck."""
