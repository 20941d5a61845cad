"""The small models are available to recipes in all tests of training."""

import pytest
from support import small_models


@pytest.fixture(scope="module", autouse=True)
def _small_models():
    small_models.register_models()
    yield
    small_models.unregister_models()
