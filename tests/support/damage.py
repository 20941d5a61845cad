"""Damage to files, and what must hold whatever it does to a scan."""

import tempfile
from pathlib import Path

from hypothesis import strategies as st

from podscale.errors import UserError

# Bytes that are overwritten, a place where others are put in, and these.
DAMAGE = st.tuples(
    st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), max_size=6),
    st.none() | st.integers(0, 2**16),
    st.binary(max_size=30),
)


def damaged(whole, damage):
    """The bytes after the damage, which may make them longer."""
    changes, cut, inserted = damage
    data = bytearray(whole)
    for at, value in changes:
        data[at % len(data)] = value
    if cut is not None:
        at = cut % len(data)
        data[at : at + len(inserted) // 2] = inserted
    return bytes(data)


def refused_or_within(scan, data, name):
    """Scans; what is found must lie within the file, and nothing but a refusal may be raised."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(data)
        try:
            part = scan(str(path))
        except UserError:
            return
    assert len(part.offsets) == len(part.lengths) == len(part.labels) > 0
    assert part.offsets.min() >= 0
    assert part.lengths.min() >= 0
    assert (part.offsets + part.lengths).max() <= len(data)
    if part.words:
        assert 0 <= part.labels.min() <= part.labels.max() < len(part.words)
