"""A real server of Azure's blob protocol (azurite) in a process of its own, with a container per use.

azurite comes from npm: it is found on the PATH, or where `npm install --prefix build/azurite-blob azurite` puts it.
"""

import base64
import hashlib
import hmac
import os
import shutil
import socket
import subprocess
import time
import urllib.request
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest
from support.buckets import find_free_port

ACCOUNT = "devstoreaccount1"
# The key that every azurite has; it is public.
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
INSTALLED = Path(__file__).parents[2] / "build/azurite-blob/node_modules/.bin/azurite-blob"
VERSION = "2021-12-02"


@contextmanager
def serve_azure():
    """Run azurite; yield its address. Without azurite, skip the test."""
    program = shutil.which("azurite-blob") or (str(INSTALLED) if INSTALLED.exists() else "")
    if not program:
        pytest.skip("azurite is not installed; npm install --prefix build/azurite-blob azurite")
    port = find_free_port()
    options = ["--inMemoryPersistence", "--silent", "--skipApiVersionCheck", "--disableTelemetry"]
    command = [program, *options, "--blobHost", "127.0.0.1", "--blobPort", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_until_ready(port, process)
        yield f"http://127.0.0.1:{port}/{ACCOUNT}"
    finally:
        process.kill()
        process.wait()


def _wait_until_ready(port, process):
    deadline = time.monotonic() + 120
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
            return
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def make_container(address, name):
    """Make a container, by a request with a shared key (Azure's documentation, "Authorize with Shared Key")."""
    date = datetime.now(UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
    path = f"/{ACCOUNT}/{ACCOUNT}/{name}"  # an emulator has the account in the path, too
    headers = f"x-ms-date:{date}\nx-ms-version:{VERSION}\n"
    text = "PUT" + "\n" * 12 + headers + f"{path}\nrestype:container"
    signature = base64.b64encode(hmac.new(base64.b64decode(KEY), text.encode(), hashlib.sha256).digest()).decode()
    request = urllib.request.Request(f"{address}/{name}?restype=container", method="PUT")
    request.add_header("x-ms-date", date)
    request.add_header("x-ms-version", VERSION)
    request.add_header("Authorization", f"SharedKey {ACCOUNT}:{signature}")
    with urllib.request.urlopen(request, timeout=10):
        pass


def use_azure(monkeypatch, address):
    """Point this process, and those that it starts, at a server."""
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    text = f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};BlobEndpoint={address}"
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", text)
