def install(message: str, exit_code: int, /) -> None:
    """Write the message (at most 1024 bytes) and exit with the code where jaxlib aborts because a peer is lost."""
