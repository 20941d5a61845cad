"""Weights in other formats: names of arrays, torchvision's and timm's state dicts."""
