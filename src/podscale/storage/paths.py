"""Refuse paths that name something other than a local file or folder."""

import os
import re

from podscale.errors import UserError

# One slash is enough: pathlib turns s3://bucket into s3:/bucket. A local folder `s3:` needs an absolute path.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/")


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
    match = _SCHEME.match(text)
    if match:
        scheme = f"{match[1]}://"
        text = text if text.startswith(scheme) else scheme + text[match.end() :]
        raise UserError(f"{option} {text}: {scheme} is not supported; give a local or mounted path")
