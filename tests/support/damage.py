"""Damage to files, and what must be true of a scan of any damaged file."""

import tempfile
from pathlib import Path

from hypothesis import strategies as st

from podscale.errors import UserError

# Bytes to overwrite (position, value), a position to insert at, and the bytes to insert there.
DAMAGE = st.tuples(
    st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), max_size=6),
    st.none() | st.integers(0, 2**16),
    st.binary(max_size=30),
)


def apply_damage(intact, damage):
    """Return the bytes after the damage, which may make them longer."""
    changes, position, inserted = damage
    data = bytearray(intact)
    for at, value in changes:
        data[at % len(data)] = value
    if position is not None:
        at = position % len(data)
        data[at : at + len(inserted) // 2] = inserted
    return bytes(data)


def assert_refused_or_within(scan, data, name):
    """Scan a file; the samples must lie within it, and only a `UserError` may be raised."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(data)
        try:
            samples = scan(str(path))
        except UserError:
            return
    assert len(samples.offsets) == len(samples.lengths) == len(samples.labels) > 0
    assert samples.offsets.min() >= 0
    assert samples.lengths.min() >= 0
    assert (samples.offsets + samples.lengths).max() <= len(data)
    if samples.class_names:
        assert 0 <= samples.labels.min() <= samples.labels.max() < len(samples.class_names)
