"""Say one sentence when JAX's runtime aborts this process because it has lost its peers.

When the first of several processes is gone, JAX's runtime aborts all others at once, in a thread of its own and with a
page of its own text; Python never hears of it. So the sentence is handed to native code in advance, together with the
exit code of a process that has lost its peers. Other aborts, such as a corrupt heap, are left alone. Without the native
extension, JAX's text and SIGABRT remain.
"""

from podscale.processes.heartbeat import GONE


def install(process: int, processes: int) -> bool:
    """Prepare the message of one of several processes.

    Args:
        process: this process's number.
        processes: how many there are; nothing is installed where there is only one.

    Returns:
        Whether the native extension is there to do so.
    """
    try:
        from podscale.processes import _abort
    except ImportError:
        return False
    if processes > 1:
        lost = "the other processes are" if process == 0 else "process 0, through which all find each other, is"
        _abort.install(
            f"podscale: process {process} ends: {lost} gone or cannot be reached (the lines above say how); "
            "the same command goes on from the last checkpoint\n",
            GONE,
        )
    return True
