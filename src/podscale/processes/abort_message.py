"""Print one sentence when JAX's runtime aborts this process because it has lost its peers.

When the main process is gone, JAX's runtime aborts all others at once, in one of its own threads and with a page of its
own text, and Python code gets no chance to run. So the sentence is given to native code in advance, together with the
exit code of a process that has lost its peers. Other aborts, such as those of a corrupt heap or of a defect in
the runtime, keep their effect. Without the native extension, JAX's text and SIGABRT remain.
"""

from podscale.processes.exit_codes import PEER_LOST, RESUME_HINT


def install(process: int, processes: int) -> bool:
    """Install the message that this process prints when it has lost its peers.

    Args:
        process: this process's number.
        processes: how many there are; nothing is installed where there is only one.

    Returns:
        Whether the native extension is available.
    """
    try:
        from podscale.processes import _abort
    except ImportError:
        return False
    if processes > 1:
        lost = "the other processes are" if process == 0 else "process 0, through which all find each other, is"
        _abort.install(
            f"podscale: process {process} ends: {lost} gone or cannot be reached (the lines above say how); "
            f"{RESUME_HINT}\n",
            f"podscale: process {process} ends: a second process has joined with a number of this run that is taken "
            f"(the lines above say which); start each of the processes 0 to {processes - 1} once, and another run at "
            f"another port; {RESUME_HINT}\n",
            PEER_LOST,
        )
    return True
