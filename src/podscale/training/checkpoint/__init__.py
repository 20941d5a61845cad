"""Checkpoints: their format, saving together, verification, and where they are stored."""
