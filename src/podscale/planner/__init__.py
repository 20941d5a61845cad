"""Results about pods that are not available: compile, search, compare with published runs, rehearse."""
