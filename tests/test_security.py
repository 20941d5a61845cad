"""No file that is read is ever executed: calls that the source must not contain, malicious files for every reader."""

import ast
import io
import json
import os
import pickle
import struct
import sys
import zipfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from podscale import recipe as recipes
from podscale.cli.main import main
from podscale.data.index.dataset import open_index
from podscale.errors import UserError
from podscale.models.weights.files import read_tensors
from podscale.training.checkpoint.checkpoints import Checkpoints, DamagedCheckpointError

SOURCE = Path(__file__).parents[1] / "src"
# Modules that run what they read, or that would make it easy.
BANNED = {
    "pickle",
    "cPickle",
    "marshal",
    "shelve",
    "dill",
    "cloudpickle",
    "joblib",
    "jsonpickle",
    "yaml",
    "code",
    "imp",
}
BANNED_CALLS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "pickle.load", "yaml.load"}


# --- the source ------------------------------------------------------------------------------------------------------


def format_dotted(node):
    """Return `a.b.c` as text; empty for anything else."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def get_keyword(call, name):
    value = next((keyword.value for keyword in call.keywords if keyword.arg == name), None)
    return value.value if isinstance(value, ast.Constant) else None


def find_violations(text):
    """Return everything in a source text that may execute what it reads."""
    violations = []
    for node in ast.walk(ast.parse(text)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        violations += [f"imports {name}" for name in names if name.partition(".")[0] in BANNED]
        if not isinstance(node, ast.Call):
            continue
        name = format_dotted(node.func)
        if name in BANNED_CALLS:
            violations.append(f"calls {name}")
        if name in ("np.load", "numpy.load") and get_keyword(node, "allow_pickle") is not False:
            violations.append("calls np.load without allow_pickle=False")
        if name == "torch.load" and get_keyword(node, "weights_only") is not True:
            violations.append("calls torch.load without weights_only=True")
        if get_keyword(node, "shell") is True:
            violations.append(f"gives {name} a shell")
    return violations


def test_the_source_never_executes_what_it_reads():
    files = sorted(SOURCE.rglob("*.py"))
    assert len(files) > 50
    assert {str(path): violations for path in files if (violations := find_violations(path.read_text()))} == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import pickle", "imports pickle"),
        ("from joblib import load", "imports joblib"),
        ("x = eval('1')", "calls eval"),
        ("np.load(file)", "without allow_pickle=False"),
        ("np.load(file, allow_pickle=True)", "without allow_pickle=False"),
        ("torch.load(file, weights_only=False)", "without weights_only=True"),
        ("subprocess.run(text, shell=True)", "a shell"),
    ],
)
def test_the_search_finds_violations(text, words):
    (violation,) = find_violations(text)
    assert words in violation
    assert find_violations("model.eval(); np.load(file, allow_pickle=False); torch.load(f, weights_only=True)") == []


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def harm(tmp_path):
    """An object whose pickle creates a file when it is loaded, and that file."""
    sign = tmp_path / "it-ran"

    class Harm:
        def __reduce__(self):
            return os.system, (f"touch {sign}",)

    pickle.loads(pickle.dumps(Harm()))  # check that loading creates the file
    assert sign.exists()
    sign.unlink()
    return Harm(), sign


def run_refused(arguments, capfd):
    """Run a command that is refused, and return its sentence."""
    assert main([str(argument) for argument in arguments]) == 2
    lines = capfd.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("podscale: ")
    return lines[0]


def test_a_pickle_inside_an_npz_is_refused(tmp_path, harm, capfd):
    evil, sign = harm
    path = tmp_path / "data.npz"
    labels = np.zeros(4, int)
    np.savez(path, train_images=np.array([evil] * 4), train_labels=labels, val_images=labels, val_labels=labels)
    options = ["--data.source", "npz", "--data.path", path, "--run", tmp_path / "run"]
    sentence = run_refused(["train", "digits", *options], capfd)
    assert "not a readable .npz file of plain arrays" in sentence
    assert not sign.exists()


def make_npy(shape, kind="|u1", data=b""):
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": kind, "fortran_order": False, "shape": shape})
    return file.getvalue() + data


@pytest.mark.parametrize(
    ("member", "words"),
    [
        (make_npy((2**40,)), "claims to have shape"),
        (make_npy((2**62, 2**62)), "claims to have shape"),
        (make_npy((2, 2), data=bytes(3)), "expected 4 bytes got 3"),
        (b"\x93NUMPY\x01\x00\xff\xff{", "EOF"),
        (b"not an array", "magic"),
    ],
)
def test_arrays_larger_than_their_data_are_refused_before_allocation(tmp_path, member, words):
    path = tmp_path / "data.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("train_images.npy", member)
    with pytest.raises(UserError, match=words):
        open_index(recipes.Data(source="npz", path=str(path)))


@pytest.mark.parametrize("suffix", [".pth", ".pt"])
def test_a_pickle_instead_of_a_state_dict_is_refused(tmp_path, harm, suffix):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: state dicts cannot be read at all")
    evil, sign = harm
    path = tmp_path / f"weights{suffix}"
    for write in (
        lambda: torch.save({"conv1.weight": torch.zeros(1), "evil": evil}, path),
        lambda: path.write_bytes(pickle.dumps({"conv1.weight": evil})),
    ):
        write()
        with pytest.raises(UserError, match="is not a readable torch state dict"):
            read_tensors(path)
        assert not sign.exists()


@pytest.mark.parametrize("content", ["pickle", "zip"])
def test_a_malicious_state_dict_is_refused_with_and_without_torch(tmp_path, harm, content):
    """Without PyTorch, nothing else may read it instead."""
    evil, sign = harm
    path = tmp_path / "weights.pth"
    if content == "pickle":
        path.write_bytes(pickle.dumps({"conv1.weight": evil}))
    else:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("archive/data.pkl", pickle.dumps({"conv1.weight": evil}))
    with pytest.raises(UserError, match=r"needs PyTorch|not a readable torch state dict"):
        read_tensors(path)
    assert not sign.exists()


def make_safetensors(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def make_entry(**changes):
    return {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes}


@pytest.mark.parametrize(
    "content",
    [
        make_safetensors(make_entry(), bytes(8), length=2**62),
        make_safetensors(make_entry(), bytes(8), length=2**27),
        make_safetensors(make_entry(), bytes(4)),
        make_safetensors(make_entry(), bytes(80)),
        make_safetensors(make_entry(shape=[2**40]), bytes(8)),
        make_safetensors(make_entry(shape=[2**63, 2**63]), bytes(8)),
        make_safetensors(make_entry(data_offsets=[0, 2**60]), bytes(8)),
        make_safetensors(make_entry(data_offsets=[8, 0]), bytes(8)),
        make_safetensors(make_entry(dtype="O"), bytes(8)),
        make_safetensors(make_entry() | {"b": make_entry()["a"]}, bytes(8)),
        make_safetensors(b"{" * 100_000),
        pickle.dumps({"a": 1}),
        b"",
    ],
)
def test_safetensors_with_a_false_header_are_refused(tmp_path, content):
    path = tmp_path / "weights.safetensors"
    path.write_bytes(content)
    with pytest.raises(UserError, match="is not a readable safetensors file"):
        read_tensors(path)


def test_foreign_files_among_checkpoints_are_ignored(tmp_path, harm):
    evil, sign = harm
    folder, state = tmp_path / "checkpoints", {"w": jnp.arange(4.0)}
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(5, state)
    foreign = {"6.pkl": pickle.dumps(evil), "5/evil.pkl": pickle.dumps(evil), "5/evil.npy": b"\x93NUMPY"}
    for name, data in foreign.items():
        (folder / name).write_bytes(data)
    (folder / "seven").mkdir()
    (folder / "..part").mkdir()
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.newest() == 5
        np.testing.assert_array_equal(checkpoints.restore(5, state)["w"], np.arange(4.0))
    assert not sign.exists()


@pytest.mark.parametrize("name", ["manifest.json", "arrays-0.bin"])
def test_a_pickle_instead_of_a_checkpoints_files_is_not_executed(tmp_path, harm, name):
    evil, sign = harm
    folder, state = tmp_path / "checkpoints", {"w": jnp.arange(4.0)}
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(5, state)
    (folder / "5" / name).write_bytes(pickle.dumps(evil))
    with pytest.raises(DamagedCheckpointError), Checkpoints(folder, read_only=True) as checkpoints:
        checkpoints.restore(5, state)
    assert not sign.exists()


def test_a_recipe_is_data_and_never_code(tmp_path, capfd):
    path = tmp_path / "mine.toml"
    path.write_text("__import__('os').system('touch it-ran')")
    assert "is not valid TOML" in run_refused(["train", path], capfd)
    path.write_text("[model]\nname = \"__import__('os')\"")
    assert "no model" in run_refused(["train", path, "--run", tmp_path / "run"], capfd).replace("there is ", "")
    assert not (tmp_path / "it-ran").exists()
    assert "mine" not in sys.modules
