"""The small models are available to recipes in all tests of training."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def _small_models(small_models):
    pass
