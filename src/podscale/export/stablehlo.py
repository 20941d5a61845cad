"""Export the whole program, from pixels to probabilities, as StableHLO."""

import io
import json
import zipfile

import jax
import numpy as np

from podscale.errors import UserError
from podscale.runs.folder import Run
from podscale.storage.files import to_json
from podscale.training import step as steps
from podscale.training.restore import TrainedModel

PLATFORMS = ("cpu", "cuda", "tpu")
PROGRAM, METADATA = "program.jax", "metadata.json"  # the members of a .stablehlo file, a zip archive


def write_stablehlo(run: Run, trained: TrainedModel, metadata: dict[str, str]) -> bytes:
    """Return a zip archive with the serialized program and the metadata."""
    program = _serialize_program(run, trained)
    facts = {name: json.loads(value) for name, value in metadata.items() if name != "format"}
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:  # without compression: weights do not compress
        archive.writestr(PROGRAM, program)
        archive.writestr(METADATA, to_json(facts, indent=1))
    return file.getvalue()


def _serialize_program(run: Run, trained: TrainedModel) -> bytes:
    """Return the program from pixels uint8 [batch, size, size, 3] to probabilities, for any batch, weights included."""
    try:
        import flatbuffers  # noqa: F401 (JAX needs it to serialize, and does not depend on it)
    except ImportError:
        raise UserError("writing StableHLO needs the package flatbuffers: pip install flatbuffers") from None
    from jax import export as jax_export  # not an attribute of `jax` until it is imported

    predict, size = steps.make_predictor(trained.net, run.recipe), run.recipe.data.image_size
    params, stats = jax.device_get((trained.params, trained.stats))
    pixels = jax.ShapeDtypeStruct((*jax_export.symbolic_shape("batch"), size, size, 3), np.uint8)
    exported = jax_export.export(jax.jit(lambda images: predict(params, stats, images)), platforms=PLATFORMS)
    return bytes(exported(pixels).serialize())
