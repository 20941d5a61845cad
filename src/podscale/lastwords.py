"""Last words: what a process says when JAX's runtime aborts it.

Where the first process of several is gone, JAX's runtime aborts all others at once, in a thread of its own, with a page
of its own words. Python never hears of it. So a sentence lies ready, in native code, with the exit code of a process
that has lost the others. Without the native extension, JAX's words and SIGABRT have to do.
"""

from podscale.peers import GONE


def ready(process: int, processes: int) -> bool:
    """Lays out the last words of one of several processes; returns whether that was possible."""
    try:
        from podscale.data import _native
    except ImportError:
        return False
    if processes > 1:
        lost = "the other processes are" if process == 0 else "process 0, through which all find each other, is"
        _native.last_words(
            f"podscale: process {process} ends: {lost} gone or cannot be reached (the lines above say how); "
            "the same command goes on from the last checkpoint\n",
            GONE,
        )
    return True
