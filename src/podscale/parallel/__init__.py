"""Computations that devices share: distributed batch normalization, collectives, gradient summation, checksums."""
