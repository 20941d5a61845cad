"""JAX's key-value store within one process, for processes that are threads."""

import threading

from podscale.processes.key_value_store import StoreError


class LocalClient:
    """Has the methods of JAX's distributed client that `KeyValueStore` calls, with the same errors."""

    def __init__(self):
        self.values, self._changed = {}, threading.Condition()

    def key_value_set(self, key, value, allow_overwrite=False):
        with self._changed:
            if key in self.values and not allow_overwrite:
                raise StoreError(f"ALREADY_EXISTS: {key}")
            self.values[key] = value
            self._changed.notify_all()

    def key_value_try_get(self, key):
        with self._changed:
            if key not in self.values:
                raise StoreError(f"NOT_FOUND: {key}")
            return self.values[key]

    def blocking_key_value_get(self, key, timeout_ms):
        with self._changed:
            if not self._changed.wait_for(lambda: key in self.values, timeout_ms / 1000):
                raise StoreError(f"DEADLINE_EXCEEDED: {key}")
            return self.values[key]

    def key_value_dir_get(self, prefix):
        with self._changed:
            return [(key, value) for key, value in self.values.items() if key.startswith(f"{prefix}/")]

    def key_value_delete(self, prefix):
        with self._changed:
            self.values = {key: value for key, value in self.values.items() if not key.startswith(prefix)}
