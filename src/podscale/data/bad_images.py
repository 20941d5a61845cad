"""Bad images: files that turn out during a run to be truncated, damaged or missing.

In training, the next image of the same lane replaces one that cannot be read, with its own label, crop and flip. This
rule depends on the data alone, so every pod, and every host that could read the image, makes the same batch. In
evaluation, such an image counts as an example that the model got wrong. In both cases the image is recorded, reported
and counted; once there are more bad images than the recipe allows, the run stops.
"""

import threading
from collections import deque

from podscale.data.index.dataset import Index
from podscale.data.index.unreadable import count_allowed
from podscale.errors import UserError

UNREADABLE = -2  # the label of an unreadable image in evaluation


class BadImages:
    """The unreadable images of one split that this process has met.

    Args:
        index: the split.
        lanes: lanes of the training order; the replacement of an image comes from the same lane.
        share: share of the split's images that may be unreadable (`data.bad_share`), at least one; 0 tolerates none.
    """

    def __init__(self, index: Index, lanes: int, share: float) -> None:
        self._index, self._lanes, self._limit = index, lanes, count_allowed(len(index), share)
        self._reasons: dict[int, str] = {}
        self._new_messages: deque[str] = deque()
        self._lock = threading.Lock()

    def add(self, sample: int, reason: str) -> None:
        """Record an unreadable image.

        Raises:
            UserError: more images are unreadable than allowed.
        """
        with self._lock:
            if sample in self._reasons:
                return
            self._reasons[sample] = reason
            self._new_messages.append(reason)
            count = len(self._reasons)
        if self._limit == 0:
            raise UserError(reason)
        if count > self._limit:
            share = f"{count} of {len(self._index)} images"
            raise UserError(
                f"{share} cannot be read, more than data.bad_share allows; the last: {reason}; "
                "`podscale data check` lists all"
            )

    def find_readable(self, sample: int) -> int:
        """Return the sample itself, or the next one of its lane that is not known to be bad.

        >>> import numpy as np
        >>> index = Index(np.zeros(2000, np.int32), np.ones((2000, 2), np.int32))
        >>> bad_images = BadImages(index, lanes=2, share=0.01)
        >>> bad_images.add(1997, "cannot read it"); bad_images.add(1999, "nor this")
        >>> bad_images.find_readable(5), bad_images.find_readable(1997)
        (5, 1)
        """
        while sample in self._reasons:
            sample = sample + self._lanes if sample + self._lanes < len(self._index) else sample % self._lanes
        return sample

    def pop_messages(self) -> list[str]:
        """Return one message for each image that was added since the last call."""
        with self._lock:
            messages = list(self._new_messages)
            self._new_messages.clear()
        return messages
