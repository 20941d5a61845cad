def install(lost: str, taken: str, exit_code: int, /) -> None:
    """Write a message (at most 1024 bytes) and exit with the code where jaxlib aborts because a peer is lost.

    `taken` is written if a second process has joined with the number of one that is there, else `lost`.
    """
