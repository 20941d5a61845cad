"""Optimizers and learning-rate schedules, as optax transformations."""
