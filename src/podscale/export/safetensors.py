"""Export the weights as safetensors, under our names or torchvision's."""

import numpy as np
import safetensors.numpy

from podscale.models.weights.names import name_arrays
from podscale.models.weights.torchvision import state_dict
from podscale.runs.folder import Run
from podscale.training.trained import TrainedModel

# --- formats -------------------------------------------------------------------------------------------------------


def write_safetensors(run: Run, trained: TrainedModel, notes: dict[str, str]) -> bytes:
    arrays = {name: np.asarray(array) for name, array in name_arrays(trained.params, trained.stats).items()}
    return safetensors.numpy.save(arrays, notes)


def write_torchvision(run: Run, trained: TrainedModel, notes: dict[str, str]) -> bytes:
    return safetensors.numpy.save(state_dict(trained.model()), notes)
