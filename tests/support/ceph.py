"""A real Ceph cluster with its S3 gateway (Debian: ceph-mon, ceph-osd, radosgw): one monitor, one OSD in memory."""

import os
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from contextlib import contextmanager
from pathlib import Path

import boto3
from support.buckets import KEYS, find_free_port

PROGRAMS = ("ceph-mon", "ceph-osd", "radosgw", "radosgw-admin", "ceph", "ceph-authtool", "monmaptool")
PACKAGES = "apt-get install --no-install-recommends ceph-mon ceph-osd radosgw"
START_S = 180
CONFIG = """
[global]
fsid = {fsid}
mon host = v1:127.0.0.1:{port}
mon initial members = a
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
keyring = {folder}/keyring
run dir = {folder}
admin socket =
pid file =
log file = {folder}/$name.log
mon cluster log file = {folder}/cluster.log
setuser match path =
crash dir = {folder}
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 1
osd pool default pgp num = 1
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
mon data = {folder}/mon
mon data avail crit = 1
mon osd full ratio = 0.99
osd data = {folder}/osd
osd objectstore = memstore
memstore device bytes = 1073741824
osd class load list = *
rgw frontends = beast endpoint=127.0.0.1:{gateway}
rgw data = {folder}/rgw
ms bind ipv4 = true
public addr = 127.0.0.1
"""


def find_missing():
    """Return a reason not to start a cluster; empty if all its programs are there."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"Ceph is not installed (no {missing[0]}); {PACKAGES}" if missing else ""


@contextmanager
def serve_ceph():
    """Run a cluster; yield the address of its S3 gateway, which knows the keys of `support.buckets`."""
    folder = Path(tempfile.mkdtemp(prefix="ceph-", dir="/tmp"))  # a short path, for sockets
    port, gateway = find_free_port(), find_free_port()
    fsid, processes = str(uuid.uuid4()), []
    (folder / "ceph.conf").write_text(CONFIG.format(fsid=fsid, port=port, gateway=gateway, folder=folder))
    environment = os.environ | {"CEPH_CONF": str(folder / "ceph.conf")}

    def run(*command):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=START_S, check=False)
        assert done.returncode == 0, (command, done.stdout[-1000:], done.stderr[-2000:])
        return done.stdout

    def start(*command):
        with (folder / f"{command[0]}.txt").open("w") as log:
            command = ("setpriv", "--pdeathsig", "KILL", *command)  # nothing outlives the tests
            processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))

    try:
        _start_monitor(folder, fsid, port, run, start)
        _start_osd(folder, run, start)
        caps = ("mon", "allow rw", "osd", "allow rwx")
        run("ceph", "auth", "get-or-create", "client.rgw", *caps, "-o", f"{folder}/rgw.key")
        start("radosgw", "-f", "-n", "client.rgw", "--keyring", f"{folder}/rgw.key")
        address = f"http://127.0.0.1:{gateway}"
        _wait_until_ready(address, processes)
        keys = ["--access-key", KEYS["AWS_ACCESS_KEY_ID"], "--secret", KEYS["AWS_SECRET_ACCESS_KEY"]]
        run("radosgw-admin", "user", "create", "--uid", "test", "--display-name", "test", *keys)
        yield address
    finally:
        for process in reversed(processes):
            process.kill()
            process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _start_monitor(folder, fsid, port, run, start):
    key, caps = f"{folder}/keyring", ("mon", "osd", "mgr")
    run("ceph-authtool", "--create-keyring", key, "--gen-key", "-n", "mon.", "--cap", "mon", "allow *")
    allowed = [option for name in caps for option in ("--cap", name, "allow *")]
    run("ceph-authtool", key, "--gen-key", "-n", "client.admin", *allowed)
    run("monmaptool", "--create", "--addv", "a", f"[v1:127.0.0.1:{port}]", "--fsid", fsid, f"{folder}/monmap")
    (folder / "mon").mkdir()
    run("ceph-mon", "--mkfs", "-i", "a", "--monmap", f"{folder}/monmap", "--keyring", key)
    start("ceph-mon", "-f", "-i", "a")


def _start_osd(folder, run, start):
    identity = str(uuid.uuid4())
    assert run("ceph", "osd", "new", identity).strip() == "0"
    (folder / "osd").mkdir()
    caps = ("mon", "allow profile osd", "osd", "allow *", "mgr", "allow profile osd")
    run("ceph", "auth", "get-or-create", "osd.0", *caps, "-o", f"{folder}/osd/keyring")
    run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", identity, "--keyring", f"{folder}/osd/keyring")
    start("ceph-osd", "-f", "-i", "0", "--keyring", f"{folder}/osd/keyring")


def _wait_until_ready(address, processes):
    deadline = time.monotonic() + START_S
    while True:
        try:
            with urllib.request.urlopen(address, timeout=5):
                return
        except urllib.error.HTTPError:
            return  # it answers
        except OSError:
            assert all(process.poll() is None for process in processes), [process.args for process in processes]
            assert time.monotonic() < deadline, "radosgw does not come up"
            time.sleep(0.5)


def make_bucket(address, name):
    keys = {"aws_access_key_id": KEYS["AWS_ACCESS_KEY_ID"], "aws_secret_access_key": KEYS["AWS_SECRET_ACCESS_KEY"]}
    boto3.client("s3", endpoint_url=address, region_name=KEYS["AWS_REGION"], **keys).create_bucket(Bucket=name)
