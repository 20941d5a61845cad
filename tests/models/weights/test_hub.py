"""Weights from the hub: the real client against a server of this process on loopback."""

import hashlib
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading

import numpy as np
import pytest
import safetensors.numpy
from flax import nnx
from rich.console import Console
from support import short_run, small_models

from podscale import recipe
from podscale.config.stop_condition import StopCondition
from podscale.errors import UserError
from podscale.models import vit
from podscale.models.weights.hub import fetch_weights
from podscale.models.weights.timm import load_timm, to_timm
from podscale.runs.folder import Run
from podscale.training.restore import load_trained

pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(http.server.BaseHTTPRequestHandler):
    """Answers like the hub for one repository with one file; counts the downloads."""

    content, downloads, damage = b"", 0, False

    def do_HEAD(self):
        self.answer(with_body=False)

    def do_GET(self):
        self.answer(with_body=True)

    def answer(self, with_body):
        parts = self.path.split("/resolve/")
        error = None
        if len(parts) != 2:
            error = "EntryNotFound"
        elif parts[0] != "/timm/small_vit":
            error = "RepoNotFound"
        elif parts[1].split("/")[0] not in ("main", COMMIT):
            error = "RevisionNotFound"
        elif not parts[1].endswith("model.safetensors"):
            error = "EntryNotFound"
        if error:
            self.send_response(404)
            self.send_header("X-Error-Code", error)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        hub, digest = type(self), hashlib.sha256(self.content).hexdigest()
        body = self.content[:-1] + b"\1" if hub.damage else self.content
        self.send_response(200)
        for name, value in {"X-Repo-Commit": COMMIT, "X-Linked-Etag": f'"{digest}"', "ETag": f'"{digest}"'}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            hub.downloads += 1
            self.wfile.write(body)

    def log_message(self, *arguments):
        pass


def build_model():
    config = recipe.Model(name="vit_tiny", patch=4)
    return vit.VisionTransformer(vit.Size(width=16, depth=1, heads=2), config, 10, 8, nnx.Rngs(0))


@pytest.fixture
def hub(monkeypatch):
    """A hub with the weights of a small network."""
    tensors = {name: np.asarray(array) for name, array in to_timm(build_model()).items()}
    tensors["head.weight"] = np.full((10, 16), 0.25, np.float32)
    handler = type("Handler", (Hub,), {"content": safetensors.numpy.save(tensors)})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield handler, server
    server.shutdown()
    server.server_close()
    thread.join()


def test_weights_are_downloaded_once_and_then_cached(hub, tmp_path):
    handler, server = hub
    model = build_model()
    load_timm(model, fetch_weights("hub:timm/small_vit", tmp_path))
    assert float(model.layers[-1].kernel[...].max()) == 0.25
    assert fetch_weights(f"hub:timm/small_vit@{COMMIT}", tmp_path) == fetch_weights("hub:timm/small_vit", tmp_path)
    assert handler.downloads == 1
    server.shutdown()
    server.server_close()
    assert fetch_weights("hub:timm/small_vit", tmp_path).is_file()  # without a network


@pytest.mark.heavy
def test_a_run_starts_from_the_hub_and_resumes_without_it(hub, tmp_path, monkeypatch, capsys):
    from huggingface_hub import constants

    handler, server = hub
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    changes = {
        "model.name": "small_vit",
        "model.patch": 4,
        "model.init": "hub:timm/small_vit",
        "model.freeze": ["body"],
    }
    changes |= {"train.epochs": 2, "train.eval_epochs": 1, "train.seed": 1}
    settings = {"recipe": recipe.load_recipe("digits").override(changes), "console": Console(soft_wrap=True)}
    small_models.register_models()
    try:
        short_run.train(tmp_path / "run", until=StopCondition("accuracy", 0.0), **settings)
        assert "the source does not name its classes" in capsys.readouterr().out
        server.shutdown()
        server.server_close()
        shutil.rmtree(tmp_path / "cache")
        assert short_run.train(tmp_path / "run", **settings)["steps"] == short_run.STEPS[-1]
        trained = to_timm(load_trained(Run.load(tmp_path / "run"), "newest").build_module())
    finally:
        small_models.unregister_models()
    assert handler.downloads == 1
    note = json.loads((tmp_path / "run" / "init.json").read_text())
    assert (note["source"], note["drawn"]) == ("hub:timm/small_vit", ["layers.3.bias", "layers.3.kernel"])
    theirs = safetensors.numpy.load(handler.content)
    moved = {name for name in theirs if not np.array_equal(trained[name], theirs[name])}
    assert moved == {"head.bias", "head.weight"}


def test_damaged_weights_are_refused(hub, tmp_path):
    handler, _ = hub
    handler.damage = True
    with pytest.raises(UserError, match=r"small_vit are damaged: delete .* and start again"):
        fetch_weights("hub:timm/small_vit", tmp_path)


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("hub:timm/no_such_vit", "there is no repository timm/no_such_vit at http://127.0.0.1:.*, or it is not public"),
        ("hub:timm/small_vit@v9", "timm/small_vit at http://127.0.0.1:.* has no revision 'v9'"),
        ("hub:timm/", "names no repository; write hub:OWNER/NAME"),
    ],
)
def test_what_the_hub_does_not_have_is_named(hub, tmp_path, source, sentence):
    with pytest.raises(UserError, match=sentence):
        fetch_weights(source, tmp_path)


@pytest.mark.slow  # the client tries again for half a minute
def test_without_network_and_cache_the_sentence_says_so(hub, tmp_path):
    _, server = hub
    server.shutdown()
    server.server_close()
    with pytest.raises(UserError, match=r"cannot reach http://127.0.0.1:.* and its weights are not cached"):
        fetch_weights("hub:timm/small_vit", tmp_path)


def test_without_an_endpoint_of_its_own_a_process_asks_the_hub_itself(tmp_path):
    """In a process of its own: the client's modules are not imported yet, and the network is off."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    code = "from podscale.models.weights.hub import fetch_weights; fetch_weights('hub:timm/small_vit')"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert "UserError: cannot reach https://huggingface.co for hub:timm/small_vit" in done.stderr


def test_without_the_package_the_sentence_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match=r"needs huggingface_hub, which is not installed; install podscale\[hub\]"):
        fetch_weights("hub:timm/small_vit")
