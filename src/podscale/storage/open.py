"""Open stores: `open_store` is the one way to a local folder or a bucket."""

import os

from podscale.storage.cloud import CloudStore
from podscale.storage.local import LocalStore
from podscale.storage.locations import Location, parse_location
from podscale.storage.store import Store


def open_store(location: str | os.PathLike[str] | Location, option: str = "") -> Store:
    """Return the store of a location. Nothing is read or created yet.

    Args:
        location: a local folder, or a folder in a bucket (see `podscale.storage.locations`).
        option: the option or field that it was given with, for the message.

    Raises:
        UserError: the location is not supported, or a bucket's client is not installed.

    >>> open_store("runs").location
    Location(scheme='', bucket='', key='runs')
    """
    if not isinstance(location, Location):
        location = parse_location(location, option)
    if location.is_local:
        return LocalStore(location)
    return CloudStore(location)
