"""Export the whole program, pixels to probabilities, as StableHLO."""

import io
import json
import zipfile

import jax
import numpy as np

from podscale.errors import UserError
from podscale.runs.folder import Run
from podscale.storage.files import to_json
from podscale.training import step as steps
from podscale.training.trained import TrainedModel

PLATFORMS = ("cpu", "cuda", "tpu")
PROGRAM, METADATA = "program.jax", "metadata.json"  # what a .stablehlo file, a zip archive, holds


def write_stablehlo(run: Run, trained: TrainedModel, notes: dict[str, str]) -> bytes:
    program = _serialize_program(run, trained)
    facts = {name: json.loads(value) for name, value in notes.items() if name != "format"}
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:  # stored as they are: weights do not compress
        archive.writestr(PROGRAM, program)
        archive.writestr(METADATA, to_json(facts, indent=1))
    return file.getvalue()


def _serialize_program(run: Run, trained: TrainedModel) -> bytes:
    """Pixels uint8 [batch, size, size, 3] to probabilities, for any batch, with the weights inside."""
    try:
        import flatbuffers  # noqa: F401 (JAX writes with it, and does not bring it along)
    except ImportError:
        raise UserError("writing StableHLO needs the package flatbuffers: pip install 'podscale[export]'") from None
    from jax import export as jax_export  # not an attribute of `jax` until it is imported

    predict, size = steps.predictor(trained.net, run.recipe), run.recipe.data.image_size
    params, stats = jax.device_get((trained.params, trained.stats))
    pixels = jax.ShapeDtypeStruct((*jax_export.symbolic_shape("batch"), size, size, 3), np.uint8)
    exported = jax_export.export(jax.jit(lambda images: predict(params, stats, images)), platforms=PLATFORMS)
    return bytes(exported(pixels).serialize())
