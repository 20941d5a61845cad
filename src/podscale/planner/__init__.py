"""Questions about pods that are not there: compile, search, compare with published runs, rehearse."""
