"""Sixteen virtual CPU devices for the whole test session, so that one process holds any pod up to 4x4."""

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 16)
jax.devices()  # starts the backend, so that no test can ask for fewer
