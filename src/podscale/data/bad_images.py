"""Bad pictures: files that turn out, in the middle of a run, to be cut off, damaged or gone.

In training, the next picture of the same lane takes the place of one that cannot be read, with its own label, crop and
mirroring: a rule that depends on the data alone, so every pod, and every host that might have met the picture, makes
the same batch. In evaluation, such a picture counts as an example that the model got wrong. Either way it is
remembered, told of, and counted; once there are more than a recipe allows, the run stops.
"""

import threading
from collections import deque

from podscale.data.index.dataset import Index
from podscale.errors import UserError

UNREADABLE = -2  # the label of such a picture in evaluation


class BadPictures:
    """The unreadable pictures of one split that this process has met."""

    def __init__(self, index: Index, lanes: int, share: float) -> None:
        self._index, self._lanes, self._limit = index, lanes, int(share * len(index))
        self._found: dict[int, str] = {}
        self._news: deque[str] = deque()
        self._lock = threading.Lock()

    def add(self, sample: int, why: str) -> None:
        """Remembers a picture; an error once there are too many."""
        with self._lock:
            if sample in self._found:
                return
            self._found[sample] = why
            self._news.append(why)
            count = len(self._found)
        if self._limit == 0:
            raise UserError(why)
        if count > self._limit:
            many = f"{count} of {len(self._index)} pictures"
            raise UserError(f"{many} cannot be read, more than data.bad_share allows; the last: {why}")

    def instead(self, sample: int) -> int:
        """The sample itself, or the next of its lane that is not known to be bad.

        >>> import numpy as np
        >>> index = Index(np.zeros(2000, np.int32), np.ones((2000, 2), np.int32))
        >>> bad = BadPictures(index, lanes=2, share=0.01)
        >>> bad.add(1997, "cannot read it"); bad.add(1999, "nor this")
        >>> bad.instead(5), bad.instead(1997)
        (5, 1)
        """
        while sample in self._found:
            sample = sample + self._lanes if sample + self._lanes < len(self._index) else sample % self._lanes
        return sample

    def news(self) -> list[str]:
        """What was found since the last time anyone asked, in words."""
        with self._lock:
            found = list(self._news)
            self._news.clear()
        return found
