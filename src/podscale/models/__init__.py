"""Networks by name, as chains of fused layers, folded for evaluation, and their weights in and out."""
