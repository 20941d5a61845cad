"""Data sets that are expensive to write, shared by the tests of data tools."""

import pytest
from support.photos import write_many, write_photos

from podscale.data.tools import prepare
from podscale.data.tools.prepare import Settings


@pytest.fixture(scope="session")
def photos(tmp_path_factory):
    """An image folder of every kind of image. Tests must not change its content."""
    return write_photos(tmp_path_factory.mktemp("photos"))


@pytest.fixture(scope="session")
def many(tmp_path_factory):
    """An image folder that fills several shards of 1 MiB. Tests must not change its content."""
    return write_many(tmp_path_factory.mktemp("many"))


@pytest.fixture(scope="session")
def uninterrupted(many, tmp_path_factory):
    """`many`, prepared without interruption by two threads."""
    folder = tmp_path_factory.mktemp("uninterrupted") / "to"
    prepare.prepare_data_set(many, folder, Settings(shard_mib=1), threads=2)
    return folder
