"""Locations: where data sets and runs are, as the user writes them: a local path, or the URL of a folder in a bucket.

    photos/train                    a local path
    s3://BUCKET/FOLDER              Amazon S3, and stores that speak its protocol
    gs://BUCKET/FOLDER              Google Cloud Storage
    az://CONTAINER/FOLDER           Azure Blob Storage; the account comes from the environment
    https://HOST/FOLDER             any web server that answers range requests; read only

Anything else with a scheme is refused; it would otherwise become a local folder of that name.
"""

import os
import re
from dataclasses import dataclass, replace

from podscale.errors import UserError

SCHEMES = ("s3", "gs", "az", "http", "https")
READ_ONLY_SCHEMES = ("http", "https")
# One slash is enough: pathlib turns s3://bucket into s3:/bucket. A local folder `s3:` needs an absolute path.
URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/+(.*)", re.DOTALL)


@dataclass(frozen=True)
class Location:
    """A folder or an object in a bucket, or a local path.

    Attributes:
        scheme: one of `SCHEMES`; empty for a local path.
        bucket: name of the bucket or container; the host of a web server; empty for a local path.
        key: path in the bucket, without slashes at its ends; or the local path.
    """

    scheme: str
    bucket: str
    key: str

    @property
    def is_local(self) -> bool:
        return not self.scheme

    @property
    def is_writable(self) -> bool:
        """Whether the scheme allows writing; the credentials may still forbid it."""
        return self.scheme not in READ_ONLY_SCHEMES

    def join(self, name: str) -> "Location":
        """Return the location of `name` in this folder."""
        if self.is_local:
            return replace(self, key=os.path.join(self.key, name))
        return replace(self, key=f"{self.key}/{name}".strip("/"))

    def __str__(self) -> str:
        return self.key if self.is_local else f"{self.scheme}://{self.bucket}/{self.key}".rstrip("/")


def parse_location(text: str | os.PathLike[str], option: str = "") -> Location:
    """Return the location that a text names.

    Args:
        text: a path or a URL, as the user gave it.
        option: the option or field that it was given with, for the message.

    Raises:
        UserError: the scheme is not supported, or the URL names no bucket.

    >>> parse_location("s3://photos/imagenet/")
    Location(scheme='s3', bucket='photos', key='imagenet')
    >>> parse_location("runs/digits").is_local
    True
    >>> parse_location("ftp://host/run", "--run")
    Traceback (most recent call last):
    podscale.errors.UserError: --run ftp://host/run: ftp:// is not supported; give a path, or s3://, gs://, az://, ...
    """
    text = os.fspath(text)
    match = URL.match(text)
    where = f"{option} " if option else ""
    if match is None:
        return Location("", "", text)
    scheme, address = match[1].lower(), match[2]
    if scheme not in SCHEMES:
        kinds = ", ".join(f"{name}://" for name in SCHEMES[:3])
        raise UserError(f"{where}{scheme}://{address}: {scheme}:// is not supported; give a path, or {kinds}, ...")
    bucket, _, key = address.partition("/")
    if not bucket:
        raise UserError(f"{where}{text}: it names no bucket; write {scheme}://BUCKET/FOLDER")
    return Location(scheme, bucket, key.strip("/"))


def has_scheme(text: str | os.PathLike[str]) -> bool:
    """Return whether a text is a URL, of any scheme, and not a local path.

    >>> has_scheme("s3://bucket/run"), has_scheme("runs/one")
    (True, False)
    """
    return URL.match(os.fspath(text)) is not None
