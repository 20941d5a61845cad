import gc

import pytest

from podscale.training.compilation import pause_garbage_collection


@pytest.mark.parametrize("is_enabled", [True, False])
def test_garbage_collection_goes_on_as_before_also_after_an_error(is_enabled):
    was_enabled = gc.isenabled()
    (gc.enable if is_enabled else gc.disable)()
    try:
        with pytest.raises(RuntimeError, match="is paused"), pause_garbage_collection():
            raise RuntimeError("is paused" if not gc.isenabled() else "goes on")
        assert gc.isenabled() == is_enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()
