"""The doctor on a bucket: rate and latency through the loader's own path, bounded, without a trace."""

import os
import time

import pytest
from support.faulty_proxy import Fault, FaultyProxy

from podscale.bench.doctor import bucket as buckets
from podscale.bench.doctor import verdict
from podscale.errors import UserError
from podscale.storage.bucket_path import BucketPath
from podscale.storage.locations import parse_location
from podscale.storage.open import open_store


@pytest.fixture
def proxy(s3_server, bucket, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    store = open_store(f"s3://{bucket}/data")
    for split in ("train", "val"):
        for number in range(2):
            store.write(f"{split}/a/{number}.jpg", os.urandom(20_000))
    store.write("train/b/shard.tar", os.urandom(1_000_000))
    store.write("classes.txt", b"a b")
    with FaultyProxy(s3_server) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.address)
        yield proxy


def test_rate_and_latency_are_measured_and_nothing_is_left(proxy, bucket, tmp_path):
    proxy.delay_s = 0.02
    result = buckets.measure_bucket(parse_location(f"s3://{bucket}/data"))
    assert result["objects"] == 5
    assert 0.02 <= result["first_byte_s"] <= result["slowest_first_byte_s"]
    assert result["requests"] == proxy.count("GET") - result["listings"] - buckets.SINGLE_REQUESTS - 1
    assert 0 < result["bytes_per_s"] < 1e9
    assert {method for method, _ in proxy.requests} == {"GET"}
    assert not (tmp_path / "cache").exists()
    rows = buckets.format_rows(result)
    assert "MB/s" in rows[0][1]
    assert "ms to the first byte" in rows[1][1]


def test_the_measurement_is_bounded_in_bytes_and_seconds(proxy, bucket, monkeypatch):
    monkeypatch.setattr(buckets, "PROBE_BYTES", 250_000)
    result = buckets.measure_bucket(parse_location(f"s3://{bucket}/data"))
    assert result["requests"] * result["image_bytes"] <= 250_000
    monkeypatch.setattr(buckets, "PROBE_S", 0.0)
    monkeypatch.setattr(buckets, "BATCH", 1)
    start = time.perf_counter()
    assert buckets.measure_bucket(parse_location(f"s3://{bucket}/data"))["requests"] >= 1
    assert time.perf_counter() - start < 5


def test_few_listings_are_made_however_many_folders_there_are(proxy, bucket, monkeypatch):
    monkeypatch.setattr(buckets, "MAX_OBJECTS", 2)
    location = parse_location(f"s3://{bucket}/data")
    objects, listings = buckets.find_objects(BucketPath(open_store(location), location))
    assert [info.key for info in objects] == ["train/a/0.jpg", "train/a/1.jpg"]
    assert listings == 3


def test_a_bucket_that_cannot_be_measured_is_one_sentence(proxy, bucket, monkeypatch):
    with pytest.raises(UserError, match=rf"^s3://{bucket}/empty has no objects of 4096 bytes or more"):
        buckets.measure_bucket(parse_location(f"s3://{bucket}/empty"))
    monkeypatch.setenv("PODSCALE_STORE_RETRY_S", "0.5")
    proxy.inject(Fault("status", status=403, times=-1))
    with pytest.raises(UserError, match="the store refuses access"):
        buckets.measure_bucket(parse_location(f"s3://{bucket}/data"))


def test_a_slow_bucket_is_the_bottleneck():
    limits = {"devices": 7000.0, "decoding": 900.0, "bucket": 9.0}
    assert "is the bucket: 9 images/s of ResNet-50 at best" in verdict.format_verdict(limits, [])
