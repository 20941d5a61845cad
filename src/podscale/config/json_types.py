"""Types of what is written as JSON: a run's files, and what commands print with `--json`."""

from typing import Any, TypeAlias

# A value of a JSON document. Code that reads one back knows its fields from the function that wrote it; JSON itself
# promises no more than that the names are strings.
Json: TypeAlias = Any
JsonObject: TypeAlias = dict[str, Json]
