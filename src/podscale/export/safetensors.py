"""Export the weights as safetensors, under our names, torchvision's or timm's."""

import numpy as np
import safetensors.numpy

from podscale.models.weights.names import name_arrays
from podscale.models.weights.timm import to_timm
from podscale.models.weights.torchvision import make_state_dict
from podscale.runs.folder import Run
from podscale.training.restore import TrainedModel


def write_safetensors(run: Run, trained: TrainedModel, metadata: dict[str, str]) -> bytes:
    """Return a file with all arrays under our names."""
    arrays = {name: np.asarray(array) for name, array in name_arrays(trained.params, trained.stats).items()}
    return safetensors.numpy.save(arrays, metadata)


def write_torchvision(run: Run, trained: TrainedModel, metadata: dict[str, str]) -> bytes:
    """Return a file with all arrays under torchvision's names."""
    return safetensors.numpy.save(make_state_dict(trained.build_module()), metadata)


def write_timm(run: Run, trained: TrainedModel, metadata: dict[str, str]) -> bytes:
    """Return a file with all arrays under timm's names."""
    return safetensors.numpy.save(to_timm(trained.build_module()), metadata)
