"""A real S3 server (moto) in a process of its own, with a bucket per use; and folders copied into buckets."""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import obstore
from obstore.store import S3Store

KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}


def find_free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def serve_s3():
    """Run moto_server; yield its address."""
    port = find_free_port()
    command = [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    try:
        _wait_until_ready(address, process)
        yield address
    finally:
        process.kill()
        process.wait()


def _wait_until_ready(address, process):
    deadline = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(f"{address}/moto-api/", timeout=5):
                return
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def make_bucket(address, name):
    request = urllib.request.Request(f"{address}/{name}", method="PUT", headers={"Authorization": "AWS test:test"})
    with urllib.request.urlopen(request, timeout=10):
        pass


def use_store(monkeypatch, address):
    """Point this process, and those that it starts, at a server."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in {**KEYS, "AWS_ENDPOINT_URL": address}.items():
        monkeypatch.setenv(name, value)


def upload_folder(folder: Path, address, bucket, prefix=""):
    """Copy all files below a folder into a bucket, by obstore itself."""
    client = S3Store(
        bucket,
        config={"endpoint": address, "access_key_id": "test", "secret_access_key": "test", "region": "us-east-1"},
        client_options={"allow_http": True},
    )
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            key = f"{prefix}/{path.relative_to(folder).as_posix()}".strip("/")
            obstore.put(client, key, path.read_bytes())
