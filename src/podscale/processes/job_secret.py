"""The secret that the processes of a job share; a launcher sets it without importing JAX."""

import os
from collections.abc import Mapping

SECRET = "PODSCALE_JOB_SECRET"  # set by `launch` and by the examples for schedulers
OPEN_MPI_SECRET = "OMPI_MCA_orte_precondition_transports"  # a random key of the job, up to 4.x


def read_secret(environment: Mapping[str, str] = os.environ) -> str:
    """Return the secret that the processes of this job share; empty if the platform gives none.

    >>> read_secret({"PODSCALE_JOB_SECRET": "a"}), read_secret({})
    ('a', '')
    """
    return environment.get(SECRET) or environment.get(OPEN_MPI_SECRET, "")
