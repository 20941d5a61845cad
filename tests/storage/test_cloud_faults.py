"""Faults of an object store, injected by a proxy: reads and writes go on, or end with one sentence."""

import functools
import os
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise

import pytest
from support.faulty_proxy import Fault, FaultyProxy

from podscale.errors import UserError, describe_os_error
from podscale.storage import cloud
from podscale.storage.open import open_store
from podscale.storage.store import ObjectChangedError, make_token

DATA = os.urandom(200_000)
HTTP_DATE = "Thu, 01 Jan 2026 00:00:00 GMT"


@pytest.fixture
def proxy(s3_server, bucket, monkeypatch):
    with FaultyProxy(s3_server) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.address)
        yield proxy


@pytest.fixture
def store(proxy, bucket):
    store = open_store(f"s3://{bucket}/folder")
    store.write("x", DATA)
    return store


@pytest.mark.parametrize(
    "fault",
    [
        Fault("status", status=429, times=3),
        Fault("status", status=503, times=3),
        Fault("status", status=500, times=2),
        Fault("reset", times=2),
        Fault("truncate", times=2),
        Fault("short", times=2),
        Fault("long", times=2),
        Fault("away", times=3),
    ],
    ids=lambda fault: f"{fault.kind} {fault.status if fault.kind == 'status' else ''}",
)
def test_a_read_goes_on_after_faults_that_pass(store, proxy, fault):
    proxy.inject(Fault(fault.kind, status=fault.status, times=fault.times, method="GET"))
    assert store.read_range("x", 1000, 150_000) == DATA[1000:150_000]


@pytest.mark.parametrize("kind", ["reset", "truncate", "short", "away"])
def test_a_listing_goes_on_after_faults_that_pass(store, proxy, kind):
    for act in (lambda: list(store.list()), lambda: list(store.list_folder().objects)):
        fault = proxy.inject(Fault(kind, times=2, method="GET"))
        assert [(info.key, info.size) for info in act()] == [("x", len(DATA))]
        assert fault.hits == 2


def test_a_store_that_is_away_for_a_while_is_waited_for(store, proxy, monkeypatch, capfd):
    monkeypatch.setattr(cloud, "ANNOUNCE_S", 1.0)
    proxy.inject(Fault("away", times=-1))
    threading.Timer(1.5, proxy.clear).start()
    assert store.read("x") == DATA
    assert store.read("x") == DATA
    assert capfd.readouterr().err == (
        f"podscale: still waiting for {store.location}/x after 1 s; it is tried for 180 s\n"
    )


def test_a_store_that_stays_away_is_an_error_within_the_time_for_retries(proxy, bucket, monkeypatch):
    monkeypatch.setenv("PODSCALE_STORE_RETRY_S", "1")
    store = open_store(f"s3://{bucket}/folder")
    proxy.inject(Fault("status", status=503, times=-1))
    start = time.monotonic()
    with pytest.raises(TimeoutError) as caught:
        store.read("x")
    assert time.monotonic() - start < 60
    message = describe_os_error(caught.value)
    assert "the store answers 503" in message
    assert message.endswith(f"s3://{bucket}/folder/x")
    assert "\n" not in message


def note_time(times, *_):
    times.append(time.monotonic())
    return True


def test_repetitions_are_few_and_come_at_growing_random_times(bucket, s3_server, monkeypatch):
    """Of two clients that fail at the same moment, each asks a bounded number of times, and not in step."""
    monkeypatch.setenv("PODSCALE_STORE_RETRY_S", "2")
    gaps = []
    for _ in range(2):
        times = []
        with FaultyProxy(s3_server) as proxy:
            monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.address)
            proxy.inject(Fault("status", status=429, times=-1, matches=functools.partial(note_time, times)))
            with pytest.raises(TimeoutError, match="the store answers 429"):
                open_store(f"s3://{bucket}/folder").read("x")
        assert 3 <= len(times) <= 20
        gaps.append([round(later - earlier, 3) for earlier, later in pairwise(times)])
    assert gaps[0] != gaps[1]
    assert max(gaps[0]) > 2 * min(gaps[0])


@pytest.mark.parametrize("status", [400, 403])
def test_credentials_that_expire_are_a_sentence_and_are_not_repeated(store, proxy, status):
    """S3 answers 400, stores that speak its protocol 403."""
    before = len(proxy.requests)
    proxy.inject(Fault("status", status=status, code="ExpiredToken", times=-1))
    for act in (lambda: store.read("x"), lambda: store.write("y", b"1"), lambda: list(store.list())):
        with pytest.raises(PermissionError, match="the credentials have expired; renew them and start again"):
            act()
    assert len(proxy.requests) == before + 3


def test_refused_access_is_a_sentence_and_is_not_repeated(store, proxy):
    before = proxy.count("GET")
    proxy.inject(Fault("status", status=403, times=-1))
    with pytest.raises(PermissionError, match="refuses access") as caught:
        store.read("x")
    assert caught.value.filename.endswith("/folder/x")
    assert proxy.count("GET") == before + 1


def test_a_bucket_that_can_be_read_but_not_written(store, proxy):
    proxy.inject(Fault("status", status=403, times=-1, method="PUT"))
    assert store.read("x") == DATA
    for write in (lambda: store.write("y", b"1"), lambda: store.create("y", b"1")):
        with pytest.raises(PermissionError, match="refuses access"):
            write()


def test_a_created_object_whose_answer_was_lost_is_ones_own(store, proxy):
    proxy.inject(Fault("lost answer", method="PUT"))
    token = make_token().encode()
    etag = store.create("lock", token)
    assert store.read("lock", etag) == token
    proxy.inject(Fault("lost answer", method="PUT"))
    with pytest.raises(FileExistsError):
        store.create("lock", make_token().encode())


def test_an_updated_object_whose_answer_was_lost_is_ones_own(store, proxy):
    etag = store.write("state", b"one")
    proxy.inject(Fault("lost answer", method="PUT"))
    token = make_token().encode()
    assert store.read("state", store.update("state", token, etag)) == token


def test_an_object_that_was_replaced_is_refused_by_its_etag(store):
    etag = store.stat("x").etag
    store.write("x", DATA[::-1])
    with pytest.raises(ObjectChangedError, match="replaced"):
        store.read_range("x", 0, 10, etag)


def test_keys_are_found_in_the_shared_files_of_a_profile(s3_server, bucket, monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name)
    (tmp_path / "config").write_text(f"[profile own]\nregion = eu-central-1\nendpoint_url = {s3_server}\n")
    (tmp_path / "credentials").write_text("[own]\naws_access_key_id = a\naws_secret_access_key = b\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "own")
    store = open_store(f"s3://{bucket}")
    store.write("x", b"1")
    assert store.read("x") == b"1"


def test_a_public_bucket_is_read_without_credentials(monkeypatch, tmp_path):
    authorizations = []

    class PublicBucket(BaseHTTPRequestHandler):
        def do_GET(self):
            authorizations.append(self.headers["Authorization"])
            self.send_response(200)
            for name, value in (("Content-Length", len(DATA)), ("ETag", '"one"'), ("Last-Modified", HTTP_DATE)):
                self.send_header(name, str(value))
            self.end_headers()
            self.wfile.write(DATA)

        def log_message(self, *_):
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), PublicBucket) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
        assert open_store("s3://public/folder").read("x") == DATA
        server.shutdown()
    assert authorizations == [None]


def test_azure_without_an_account_says_how_to_name_it(monkeypatch):
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    with pytest.raises(UserError, match="no account is named; set AZURE_STORAGE_ACCOUNT_NAME and"):
        open_store("az://container")


def test_a_server_that_is_not_there_is_named_with_the_seconds_it_was_tried(monkeypatch):
    monkeypatch.setenv("PODSCALE_STORE_RETRY_S", "1")
    with pytest.raises(TimeoutError, match=r"does not answer \(tried for [0-9]+ s\); check the address"):
        open_store("http://127.0.0.1:1/folder").read("x")


def test_settings_that_make_no_sense_are_refused(bucket, monkeypatch):
    monkeypatch.setenv("PODSCALE_STORE_RETRY_S", "soon")
    with pytest.raises(UserError, match="PODSCALE_STORE_RETRY_S is soon"):
        open_store(f"s3://{bucket}")
