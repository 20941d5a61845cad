"""torchvision's weights, against a NumPy reference network and, where it is installed, torchvision itself."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from podscale import recipe
from podscale.errors import UserError
from podscale.models import registry
from podscale.models.weights.torchvision import from_torchvision, load_torchvision, to_torchvision


def build_model(name: str = "resnet8", size: int = 32, classes: int = 10, **config) -> nnx.Module:
    model = registry.build_model(recipe.Model(**{"name": name, "width": 8} | config), classes, size)
    model.eval()
    return model


def sample_images(size: int = 32) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(2, size, size, 3))


def randomize(tensors: dict[str, np.ndarray], seed: int = 0) -> dict[str, np.ndarray]:
    """Return weights none of which is 0 or 1 and with which outputs stay of order 1, so that no mistake can hide."""
    rng = np.random.default_rng(seed)

    def sample(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name.endswith("running_var"):
            return rng.uniform(0.5, 1.5, shape)
        if len(shape) == 1:
            return rng.uniform(0.2, 0.8, shape) * rng.choice([-1, 1], shape)
        return rng.normal(size=shape) / np.sqrt(np.prod(shape[1:]))

    return {k: sample(k, v.shape).astype(v.dtype) for k, v in tensors.items() if "num_batches" not in k}


# --- the reference implementation, in torchvision's names and layout -----------------------------------------------


def convolve(x: np.ndarray, weight: np.ndarray, stride: int) -> np.ndarray:
    """Return the cross-correlation of x [n, c, h, w] with weight [o, c, k, k], padded by k // 2."""
    side, margin = weight.shape[2], weight.shape[2] // 2
    x = np.pad(x, ((0, 0), (0, 0), (margin, margin), (margin, margin)))
    windows = np.lib.stride_tricks.sliding_window_view(x, (side, side), axis=(2, 3))[:, :, ::stride, ::stride]
    return np.einsum("nchwij,ocij->nohw", windows, weight, optimize=True)


def max_pool(x: np.ndarray) -> np.ndarray:
    """Return the maximum of each 3x3 window at stride 2."""
    x = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=-np.inf)
    return np.lib.stride_tricks.sliding_window_view(x, (3, 3), axis=(2, 3))[:, :, ::2, ::2].max((4, 5))


def compute_logits(tensors: dict[str, np.ndarray], images: np.ndarray, small: bool = False) -> np.ndarray:
    """Return the logits of a ResNet with these weights."""

    def convolve_and_normalize(x: np.ndarray, conv: str, norm: str, stride: int = 1) -> np.ndarray:
        y = convolve(x, tensors[f"{conv}.weight"], stride)
        scale, bias, mean, var = (
            tensors[f"{norm}.{k}"][:, None, None] for k in ("weight", "bias", "running_mean", "running_var")
        )
        return (y - mean) / np.sqrt(var + 1e-5) * scale + bias

    x = np.maximum(convolve_and_normalize(images.transpose(0, 3, 1, 2), "conv1", "bn1", 1 if small else 2), 0)
    x = x if small else max_pool(x)
    blocks = dict.fromkeys(k.rsplit(".", 2)[0] for k in tensors if k.startswith("layer") and ".conv1." in k)
    for block in blocks:
        stride = 2 if block.endswith(".0") and not block.startswith("layer1") else 1
        depth = 3 if f"{block}.conv3.weight" in tensors else 2
        y = x
        for i in range(1, depth + 1):
            y = convolve_and_normalize(y, f"{block}.conv{i}", f"{block}.bn{i}", stride if i == depth - 1 else 1)
            y = np.maximum(y, 0) if i < depth else y
        if f"{block}.downsample.0.weight" in tensors:
            x = convolve_and_normalize(x, f"{block}.downsample.0", f"{block}.downsample.1", stride)
        x = np.maximum(x + y, 0)
    return x.mean((2, 3)) @ tensors["fc.weight"].T + tensors["fc.bias"]


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("name", "stem", "size"),
    [("resnet8", "small", 9), ("resnet8", "conv7", 37), ("resnet18", "space_to_depth", 34), ("resnet50", "conv7", 33)],
)
def test_logits_match_the_numpy_reference_to_float64_rounding(name, stem, size):
    with jax.enable_x64(True):
        model = build_model(name, size, stem=stem, precision="float64")
        weights = randomize(to_torchvision(model))
        from_torchvision(model, weights)
        logits = np.asarray(jax.jit(model)(jnp.asarray(sample_images(size))))
    expected = compute_logits(weights, sample_images(size), small=stem == "small")
    assert abs(expected).max() > 0.1
    np.testing.assert_allclose(logits, expected, rtol=1e-11, atol=1e-11)


# --- exchange --------------------------------------------------------------------------------------------------------


@pytest.mark.heavy
@pytest.mark.parametrize(("name", "stem"), [("resnet8", "small"), ("resnet50", "space_to_depth")])
def test_export_and_import_give_the_same_logits(name, stem):
    first, second = build_model(name, stem=stem), build_model(name, stem=stem)
    from_torchvision(first, randomize(to_torchvision(first)))
    logits = nnx.jit(lambda model: model(jnp.asarray(sample_images(), jnp.float32)))
    assert not np.array_equal(logits(first), logits(second))
    from_torchvision(second, to_torchvision(first))
    np.testing.assert_array_equal(logits(first), logits(second))


def test_names_and_shapes_are_those_of_torchvision():
    model = nnx.eval_shape(lambda: registry.build_model(recipe.Model(name="resnet50", stem="conv7"), 1000, 224))
    tensors = export_shapes(model)
    assert len(tensors) == 267  # torchvision's resnet50 has 320 with its 53 counters
    assert tensors["conv1.weight"] == (64, 3, 7, 7)
    assert tensors["layer1.0.downsample.0.weight"] == (256, 64, 1, 1)
    assert tensors["layer3.5.conv2.weight"] == (256, 256, 3, 3)
    assert tensors["layer4.2.bn3.running_var"] == (2048,)
    assert tensors["fc.weight"] == (1000, 2048)


def export_shapes(model: nnx.Module) -> dict[str, tuple[int, ...]]:
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), nnx.state(model))
    nnx.update(model, zeros)
    return {name: tensor.shape for name, tensor in to_torchvision(model).items()}


def test_batch_counters_are_ignored():
    model = build_model()
    weights = randomize(to_torchvision(model))
    from_torchvision(model, weights | {"bn1.num_batches_tracked": np.asarray(7)})
    np.testing.assert_array_equal(to_torchvision(model)["bn1.weight"], weights["bn1.weight"])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"layer2.0.bn1.running_mean": None}, r"the weights lack layer2\.0\.bn1\.running_mean.*\(16,\)"),
        ({"layer9.0.conv1.weight": np.zeros(3)}, r"layer9\.0\.conv1\.weight has no place in this model"),
        ({"fc.weight": np.zeros((11, 32))}, r"fc\.weight has shape \(11, 32\), but this model needs \(10, 32\)"),
        ({"conv1.weight": np.zeros((3, 3, 3, 8))}, r"conv1\.weight has shape \(3, 3, 3, 8\), .* \(8, 3, 3, 3\)"),
    ],
)
def test_tensor_that_does_not_fit_is_named_and_the_model_stays_unchanged(change, sentence):
    model = build_model()
    before = to_torchvision(model)
    weights = {k: v for k, v in (randomize(before) | change).items() if v is not None}
    with pytest.raises(UserError, match=sentence):
        from_torchvision(model, weights)
    after = to_torchvision(model)
    assert all(np.array_equal(before[k], after[k]) for k in before)


def test_other_kinds_of_models_are_refused():
    with pytest.raises(UserError, match="fit a ResNet, not a Linear"):
        to_torchvision(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))


# --- files -----------------------------------------------------------------------------------------------------------


def test_safetensors_files_are_read(tmp_path):
    model = build_model()
    weights = randomize(to_torchvision(model))
    safetensors.numpy.save_file(weights, tmp_path / "w.safetensors")
    load_torchvision(model, tmp_path / "w.safetensors")
    after = to_torchvision(model)
    assert all(np.array_equal(weights[k], after[k]) for k in weights)


def test_missing_damaged_and_foreign_files_are_refused(tmp_path):
    (tmp_path / "bad.safetensors").write_bytes(b"not what it says")
    (tmp_path / "w.npz").write_bytes(b"of another format")
    for name, sentence in {
        "none.safetensors": "there is no weights file",
        "bad.safetensors": "not a readable safetensors file",
        "w.npz": "must be one of .safetensors, .pth, .pt",
    }.items():
        with pytest.raises(UserError, match=sentence):
            load_torchvision(build_model(), tmp_path / name)


def test_torch_file_without_torch_names_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    (tmp_path / "w.pth").write_bytes(b"")
    with pytest.raises(UserError, match="needs PyTorch"):
        load_torchvision(build_model(), tmp_path / "w.pth")


def test_torch_state_dicts_are_read_and_others_refused(tmp_path):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    model = build_model()
    weights = randomize(to_torchvision(model))
    tensors = {k: torch.from_numpy(v) for k, v in weights.items()}
    torch.save(tensors | {"bn1.num_batches_tracked": torch.tensor(7)}, tmp_path / "w.pth")
    load_torchvision(model, tmp_path / "w.pth")
    after = to_torchvision(model)
    assert all(np.array_equal(weights[k], after[k]) for k in weights)
    torch.save({k: v.bfloat16() for k, v in tensors.items()}, tmp_path / "half.pt")
    load_torchvision(model, tmp_path / "half.pt")
    np.testing.assert_allclose(to_torchvision(model)["fc.weight"], weights["fc.weight"], rtol=2**-8)
    torch.save({"model": tensors}, tmp_path / "nested.pth")
    (tmp_path / "bad.pth").write_bytes(b"not what it says")
    for name, sentence in {"nested.pth": "a state dict alone", "bad.pth": "not a readable torch state dict"}.items():
        with pytest.raises(UserError, match=sentence):
            load_torchvision(model, tmp_path / name)


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_logits_match_torchvision(name):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    torchvision = pytest.importorskip("torchvision", reason="torchvision is not installed")
    peer = getattr(torchvision.models, name)(weights=None).eval()
    weights = randomize({k: v.numpy() for k, v in peer.state_dict().items()})
    peer.load_state_dict({k: torch.from_numpy(v) for k, v in weights.items()}, strict=False)
    images = sample_images(96).astype(np.float32)
    with torch.no_grad():
        expected = peer(torch.from_numpy(images.transpose(0, 3, 1, 2).copy())).numpy()
    for stem in ("conv7", "space_to_depth"):
        model = build_model(name, 96, 1000, stem=stem, width=64)
        from_torchvision(model, weights)
        logits = jax.jit(model)(jnp.asarray(images))
        assert abs(expected).max() > 0.1
        np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)
