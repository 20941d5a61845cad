"""What a bucket must deliver: arithmetic that agrees with what the loader asks for, and its cost."""

import tarfile
from dataclasses import replace

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support import photos, writers
from support.faulty_proxy import FaultyProxy
from support.prepared import open_data_set

from podscale.config.options import Options
from podscale.data.bucket import requests
from podscale.data.bucket.requests import BLOCK_BYTES
from podscale.data.loader import load_train_batches
from podscale.forecast import bucket as buckets
from podscale.forecast.bucket import BucketLoad, Contents, describe_contents
from podscale.plan import Counts, make_plan
from podscale.planner import queries
from podscale.pod import Pod, parse_pod
from podscale.recipe import Recipe, load_recipe, override_recipe
from podscale.storage.open import open_store

IMAGES, BATCH = 24, 8
IMAGENET = Counts(1281167, 50000, 1000)


def plan_imagenet(pod):
    return make_plan(load_recipe("resnet50-imagenet-32k"), pod, IMAGENET)


def make_load(source, pod, *, images_per_s=0.0, has_index=False):
    return BucketLoad(plan_imagenet(pod), Contents(source, 1281167, 50000, has_index=has_index), images_per_s)


def test_class_folders_take_a_request_per_image_and_another_to_index_it():
    load = make_load("folder", parse_pod("v3:32x32"), images_per_s=1_000_000.0)
    assert (load.train_requests, load.eval_requests, load.index_reads) == (1281167, 50000, 1331167)
    assert load.listings == 1 + 1000 + 1331
    assert load.train_bytes == pytest.approx(1281167 * 110_000)
    hosts = load.plan.pod.hosts
    assert load.requests_per_s == pytest.approx(1e6 / hosts)
    assert load.bytes_per_s == pytest.approx(1e6 * 110_000 / hosts)
    assert load.longest_request_s == pytest.approx(128 / (1e6 / hosts))
    usd = {"index": 1.331167 * 0.4 + 2332 * 5e-6, "epoch": 1.331167 * 0.4}
    assert load.compute_usd() == pytest.approx(usd | {"uncached_run": (72 * 1.281167 + 18 * 0.05) * 0.4})
    assert load.compute_usd(4.0)["epoch"] == pytest.approx(5.324668)


def test_one_host_with_little_data_fetches_shards_in_blocks_and_many_hosts_do_not():
    recipe = override_recipe(load_recipe("resnet50-imagenet-32k"), {"data.lanes": 1})
    plan = make_plan(recipe, parse_pod("v3:2x2"), Counts(10_000, 1000, 1000))
    load = BucketLoad(plan, Contents("tar", 10_000, 1000))
    assert load.in_blocks
    assert load.train_requests == -(-10_000 * 110_000 // BLOCK_BYTES)
    reads = load.compute_usd(1e6)["uncached_run"]  # blocks need a disk cache
    assert reads >= plan.recipe.train.epochs * 10_000 + len(plan.eval_steps()) * load.eval_requests
    assert not make_load("tar", parse_pod("v3:2x2")).in_blocks  # looks 2 GiB ahead of 141 GB
    assert not replace(load, plan=plan_imagenet(parse_pod("v3:32x32"))).in_blocks
    assert not replace(load, contents=Contents("folder", 10_000, 1000)).in_blocks


def test_the_index_of_shards_takes_the_reads_that_were_measured():
    pod = parse_pod("v3:2x2")
    photos, thumbnails = (Contents("tar", 1_000_000, 10, image_bytes=size) for size in (101_000, 2_200))
    assert BucketLoad(plan_imagenet(pod), photos).index_reads == pytest.approx(1_103_011, rel=0.01)
    assert BucketLoad(plan_imagenet(pod), thumbnails).index_reads == pytest.approx(9 * 1000, rel=0.1)


def test_what_data_prepare_writes_is_cheaper_than_class_folders_and_not_than_itself():
    folder, prepared = (
        make_load(*words) for words in (("folder", parse_pod("v3:32x32")), ("tar", parse_pod("v3:32x32")))
    )
    cheaper = buckets.find_cheaper(folder)
    assert cheaper.first_requests < folder.first_requests - 1_331_000
    assert buckets.find_cheaper(prepared).first_requests == cheaper.first_requests  # only the index is missing
    assert buckets.find_cheaper(cheaper) is None
    assert "`podscale data prepare` writes tars" in buckets.suggest_cheaper(folder)
    assert "--longest N" in buckets.suggest_cheaper(cheaper)


@pytest.mark.parametrize("in_blocks", [True, False])
def test_the_loader_makes_the_requests_that_are_predicted(s3_server, bucket, tmp_path, monkeypatch, in_blocks):
    if not in_blocks:
        monkeypatch.setattr(requests, "MIN_DENSITY", 2.0)
        monkeypatch.setattr(buckets, "MIN_DENSITY", 2.0)
    monkeypatch.setattr("podscale.storage.cloud.MERGE_GAP", -1)  # neighbours are not fetched together
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    store = open_store(f"s3://{bucket}")
    for split in ("train", "val"):
        with tarfile.open(tmp_path / f"{split}-0.tar", "w") as tar:
            for i in range(IMAGES):
                path = tmp_path / split / f"{i}.jpg"
                photos.save_image(path, i, 160 + 3 * i, 190 - 2 * i)
                writers.add_member(tar, f"{'ab'[i % 2]}/{i}.jpg", path.read_bytes())
        store.write_file(f"{split}-0.tar", tmp_path / f"{split}-0.tar")
    changes = {"data.image_size": 16, "data.lanes": 1, "batch.size": BATCH, "batch.span": 4}
    with FaultyProxy(s3_server) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.address)
        splits = open_data_set(f"s3://{bucket}")
        pod = Pod("cpu", 1, 1, devices=tuple(jax.devices()[:1]))
        plan = make_plan(override_recipe(Recipe(), changes), pod, Counts(IMAGES, IMAGES, 2), Options(steps_per_call=1))
        before = proxy.count("GET")
        sharding = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("devices",)), P(None, None, "devices"))
        steps = [range(step, step + 1) for step in range(IMAGES // BATCH)]
        with load_train_batches(splits.train, plan, steps, sharding) as batches:
            assert len(list(batches)) == len(steps)
        load = BucketLoad(plan, describe_contents("tar", splits))
        assert load.train_requests == (1 if in_blocks else IMAGES)
        assert proxy.count("GET") - before == load.train_requests
    assert load.contents.image_bytes == pytest.approx(splits.train.count_encoded_bytes().mean(), rel=0.2)
    assert not load.contents.is_assumed


def test_a_plan_for_a_named_pod_says_what_the_bucket_must_deliver_from_counts_alone(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # nobody is there to ask
    recipe = override_recipe(load_recipe("resnet50-imagenet-32k"), {"data.path": "s3://nowhere/imagenet"})
    rows, values = queries.plan_on_pod(recipe, parse_pod("v3:32x32"), Options(), compiles=False)
    texts = dict(rows)
    assert (
        "1,281,167 requests (one per image) and 140.9 GB in the first epoch, images of 110 kB (assumed)"
        in texts["bucket"]
    )
    assert "requests/s and" in texts["bucket rate"]
    assert "S3 starts with 5,500 reads/s per prefix" in texts["bucket rate"]
    assert "0.53 USD for the first epoch" in texts["bucket cost"]
    assert "S3 Standard, us-east-1, November 2026" in texts["bucket cost"]
    assert "instead of" in texts["cheaper"]
    rate = recipe.batch.size / sum(
        values["forecast"]["parts_s"][part] for part in ("compute", "batch norm", "summation")
    )
    assert values["bucket"]["images_per_s"] == pytest.approx(rate)
    on_disk = queries.plan_on_pod(
        load_recipe("resnet50-imagenet-32k"), parse_pod("v3:32x32"), Options(), compiles=False
    )
    assert "bucket" not in on_disk.values
