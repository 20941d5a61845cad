"""Google's protocol in front of a real S3 server: a proxy that translates what differs between the two.

Google's XML protocol is S3's, but for the conditions of a write: it compares generations, which every answer names,
where S3 compares ETags. This is no emulator: nothing but obstore's own requests to `gs://` is tested by it.
"""

import os
import zlib
from urllib.parse import quote, unquote

from support.faulty_proxy import FaultyProxy, Handler

CONDITION, GENERATION = "x-goog-if-generation-match", "x-goog-generation"


class GoogleProxy(FaultyProxy):
    """Answers requests of Google's protocol from an S3 server."""

    def __init__(self, upstream):
        super().__init__(upstream, handler=_GoogleHandler)
        self.etags: dict[str, str] = {}  # by generation

    def name_generation(self, etag):
        """Return the generation of an ETag: here, an object that has the same content again has the same one."""
        generation = str(1 + zlib.crc32(etag.encode()))
        self.etags[generation] = etag
        return generation


class _GoogleHandler(Handler):
    def _forward(self, body):
        path, *query = self.path.split("?", 1)
        self.path = "?".join([quote(unquote(path)), *query])  # moto finds no bucket with escaped hyphens
        for name in ("Authorization", "If-Match", "If-None-Match"):
            if self.command == "PUT" or name == "Authorization":
                del self.headers[name]  # Google ignores these conditions in a PUT
        generation = self.headers.get(CONDITION)
        if generation == "0":
            self.headers["If-None-Match"] = "*"
        elif generation:
            self.headers["If-Match"] = self.proxy.etags.get(generation, '"none"')
        status, headers, content = super()._forward(body)
        if etag := headers.get("ETag"):
            headers[GENERATION] = self.proxy.name_generation(etag)
        return status, headers, content


def use_google(monkeypatch, address):
    """Point this process, and those that it starts, at a server."""
    for name in [name for name in os.environ if name.startswith("GOOGLE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", address)
