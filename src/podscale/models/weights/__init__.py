"""Weights in other formats: names of arrays, and torchvision's state dicts."""
