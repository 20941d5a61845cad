"""Names of shards and of their members."""

import pytest

from podscale.data.tools import shards
from podscale.errors import UserError


def test_too_many_shards_for_sortable_names_are_refused(monkeypatch):
    assert shards.format_shard_name("train", 99_999) == "train-99999.tar"
    with pytest.raises(UserError, match="make them larger with --shard-mib"):
        shards.format_shard_name("train", 100_000)


def test_the_longest_keys_fit_a_plain_tar_header():
    key = shards.make_key(10**8 - 1, "dir/" + "é" * 200 + ".jpeg")
    assert len(f"{key}.webp".encode()) <= 100
