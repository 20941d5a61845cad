"""Which products fit a GPU's shared memory."""

from podscale.kernels import blocking


def choose(rows, groups, depth, columns, left_arrays=2, extras=3, sums=2, computes_left=True):
    product = blocking.Product(rows, groups, depth, columns, left_arrays, extras, sums, computes_left)
    return blocking.choose_blocking(product)


def test_products_that_do_not_fit_have_no_blocking():
    assert choose(1000, 1, 64, 64) is None  # rows that tiles of 128 do not divide
    assert choose(64 * 49 * 4, 4, 2048, 512) is None
    assert choose(1024, 1, 96, 64) is None  # channels that boxes of 64 do not divide
    assert choose(1024, 1, 64, 32) is None
    assert choose(1024, 1, 2048, 512) is None  # more than shared memory holds


def test_every_blocking_fits_shared_memory():
    for depth in (64, 128, 256, 512, 1024, 2048):
        for columns in (64, 128, 256, 512, 1024, 2048):
            for left_arrays, extras, sums in ((1, 0, 2), (2, 0, 2), (2, 2, 2), (2, 4, 3)):
                result = choose(1 << 16, 4, depth, columns, left_arrays, extras, sums)
                assert result is None or result.bytes <= blocking.SHARED_BYTES
                assert result is None or result.part * result.parts == columns
