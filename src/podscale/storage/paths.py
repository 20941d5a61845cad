"""Refuse paths that name something other than a local file or folder."""

import os

from podscale.errors import UserError
from podscale.storage.locations import URL


def require_local(path: str | os.PathLike[str], option: str) -> None:
    """Refuse a path with a scheme, such as s3://bucket/run, which would become a local folder named `s3:`.

    Args:
        path: the path as the user gave it.
        option: the option or field that it was given with, for the message.

    Raises:
        UserError: the path begins with a scheme.

    >>> require_local("runs/digits", "--run")
    >>> require_local("s3://bucket/run", "--run")
    Traceback (most recent call last):
    podscale.errors.UserError: --run s3://bucket/run: s3:// is not supported; give a local or mounted path
    """
    text = os.fspath(path)
    match = URL.match(text)
    if match:
        scheme = f"{match[1]}://"
        text = text if text.startswith(scheme) else scheme + match[2]
        raise UserError(f"{option} {text}: {scheme} is not supported; give a local or mounted path")
