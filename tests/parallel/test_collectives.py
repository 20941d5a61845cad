"""Geometry of the collectives: the ring through all chips of a torus, and padding."""

import numpy as np
import pytest

from podscale.parallel import collectives
from podscale.parallel.routes import find_hamiltonian_cycle


@pytest.mark.parametrize("rows", range(1, 13))
def test_hamiltonian_cycle_visits_every_chip_once_along_links(rows):
    for cols in range(1, 13):
        cycle = np.array(find_hamiltonian_cycle(rows, cols))
        assert {tuple(chip) for chip in cycle} == set(np.ndindex(rows, cols))
        assert len(cycle) == rows * cols
        if len(cycle) > 1:
            distances = np.abs(np.roll(cycle, -1, axis=0) - cycle)
            np.testing.assert_array_equal(np.minimum(distances, [rows, cols] - distances).sum(1), 1)


def test_padding_is_to_whole_tiles_only_where_that_is_cheap():
    assert collectives.compute_padding(1000, 16) == 8
    assert collectives.compute_padding(25_557_032, 16) == -25_557_032 % (16 * 1024)
    assert collectives.compute_padding(0, 16) == 0
