"""The commands, one module per group; each function takes the parsed arguments and returns a `Result`.

JAX is imported inside the functions, after the arguments have been checked, so that mistakes are reported at once.
"""
