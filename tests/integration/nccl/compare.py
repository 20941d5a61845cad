"""Compare what two groups of ranks have computed: losses, every array of the last checkpoint, evaluations."""

import jax
import numpy as np
from integration.nccl.cases import NOISE, TOLERANCES

from podscale import pod
from podscale.runs.folder import Run
from podscale.training.checkpoint.checkpoints import Checkpoints
from podscale.training.setup import prepare


def list_noise(name):
    """Return the cases whose differences are the noise that a case may have."""
    rounded, exact = NOISE.get(name, ((), ""))
    return [*rounded, exact] if rounded else []


def judge(case, results, folder):
    """Return whether a case came out right, with its difference from what it is compared with."""
    first = results[0]
    match case.kind:
        case "sums":
            same = all(result["wrong"] == first["wrong"] for result in results)
            note = f"{first['sums']} sums, exact on integers, the same bits on all ranks"
            return {"right": same and not first["wrong"], "error": str(first["wrong"]), "note": note}
        case "bench":
            error = first["largest_error"]
            points = ", ".join(f"{p['strategy']} {p['ms']:.1f}" for p in first["points"] if p["bytes"] >= 1e6)
            return {"right": error == 0, "difference": error, "allowed": 0.0, "note": f"1 MB in ms: {points}"}
    note = f"{first['kernels']} kernels" if "kernels" in first else f"accuracy {first['accuracy']:.4f}"
    if not case.like:
        return {"right": True, "note": note}
    noise = NOISE.get(case.name)
    allowed = measure_noise(folder, case, *noise) if noise else TOLERANCES[case.precision]
    difference = measure_difference(folder, case, case.like)
    verdict = {"right": bool(difference <= allowed), "difference": float(difference), "allowed": float(allowed)}
    if case.kind == "train" and case.precision == "float64" and not have_same_predictions(folder, case, case.like):
        return verdict | {"right": False, "error": "other images of the validation set are right"}
    if case.kind == "train" and noise:
        rounded, exact = noise
        arrays = compare_states(folder, case.name, case.like)
        most = max(compare_states(folder, name, exact) for name in rounded)
        if not arrays <= most:
            return verdict | {
                "right": False,
                "error": f"arrays differ by {arrays:.1e} in the mean, noise is {most:.1e}",
            }
        note = f"{note}; arrays {arrays:.1e} of {most:.1e}"
    return verdict | {"note": note}


def measure_noise(folder, case, rounded, exact):
    """Return the most by which the rounding of bfloat16 may change what is computed.

    For gradients it is how far those of one process are from float32's. Losses of ten steps have few digits that
    rounding does not touch, and each training is one draw. So several are compared with float32's, and a case may be
    twice as far from what it is compared with as the farthest of them: rounding moves both.
    """
    if case.kind == "fused":
        (name,) = rounded
        return compare_arrays(read_gradients(folder, name), read_gradients(folder, exact), np.mean)
    return 2 * max(compare_losses(folder, name, exact) for name in rounded)


def measure_difference(folder, case, like):
    """Return the largest difference of losses, relatively, and of arrays, relative to their largest value."""
    name = case.run or case.name
    if case.kind == "fused":
        return compare_arrays(read_gradients(folder, name), read_gradients(folder, like), np.mean)
    losses = compare_losses(folder, name, like)
    if list_noise(case.name):  # arrays are compared in the mean: the largest difference is that of a single value
        return losses
    return max(losses, compare_arrays(read_state(folder, name), read_state(folder, like), np.max))


def compare_states(folder, one, other):
    """Return the mean over the arrays of two runs of their largest difference, relative to the largest value."""
    return compare_arrays(read_state(folder, one), read_state(folder, other), np.mean)


def compare_losses(folder, one, other):
    first, second = (np.array(read_losses(folder, name)) for name in (one, other))
    assert len(first) == len(second) > 0, (one, other, len(first), len(second))
    return np.max(np.abs(first - second) / np.abs(second))


def compare_arrays(one, other, summarize):
    """Return the largest difference of two trees, or the mean over their arrays, relative to each array's largest."""
    assert one.keys() == other.keys()
    largest = {name: max(np.abs(array).max(), 1e-30) for name, array in other.items()}
    return summarize([np.abs(one[name] - array).max() / largest[name] for name, array in other.items()])


def have_same_predictions(folder, case, like):
    return find_run(folder, case.run or case.name).mistakes()["correct"] == find_run(folder, like).mistakes()["correct"]


def find_run(folder, name):
    return Run.load(folder / name.replace(" ", "-"))


def read_losses(folder, name):
    return [m["loss"] for m in find_run(folder, name).metrics() if m["event"] == "train"]


def read_state(folder, name):
    """Return all arrays of a run's newest checkpoint, by name."""
    run = find_run(folder, name)
    with jax.enable_x64(run.recipe.model.precision == "float64"), Checkpoints(run.checkpoints, read_only=True) as saved:
        state = saved.restore(saved.newest(), prepare(run.recipe, pod.make_pod(jax.devices()[:1], "1x1")).init_state())
        return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(state)}


def read_gradients(folder, name):
    with np.load(folder / name.replace(" ", "-") / "arrays.npz") as arrays:
        return {key: arrays[key] for key in arrays}
