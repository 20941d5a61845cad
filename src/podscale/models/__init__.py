"""Networks by name, as chains of fused layers, folded for evaluation, and weights in other formats."""
