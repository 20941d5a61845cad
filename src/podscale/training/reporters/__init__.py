"""Reporters: what a training logs to its journal, the terminal, trackers and the report."""
