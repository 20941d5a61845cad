"""GPU kernels, each beside a plain twin that says the same in a few lines."""
