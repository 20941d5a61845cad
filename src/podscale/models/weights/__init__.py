"""Weights in and out, by name."""
