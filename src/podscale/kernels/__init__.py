"""GPU kernels for fused layers, beside reference implementations that XLA compiles on any device."""
