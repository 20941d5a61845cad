"""The exit codes of the command line: how a command ended, and whether it helps to start it again."""

FAILED = 1  # a defect of Podscale, with a traceback
USER_ERROR = 2  # a mistake of the user's, or a full disk, in one sentence; the same command ends in the same way
DIVERGED = 65  # bad data in sysexits.h: the loss stays non-finite; a restart does not help
PEER_LOST = 69  # unavailable in sysexits.h: another process is gone, or cannot be reached; a restart helps
STUCK = 70  # an internal error in sysexits.h: the run made no progress; a restart helps
PREEMPTED = 75  # a temporary failure in sysexits.h: stopped on request; a restart helps
INTERRUPTED = 130  # Ctrl-C, as shells report it

RESUMABLE_CODES = (PEER_LOST, STUCK, PREEMPTED)  # after these, the same command resumes
RESUME_HINT = "the same command resumes from the last checkpoint, if there is one"
FINAL_CODES = (0, USER_ERROR, DIVERGED, INTERRUPTED)  # after these, the same command would end in the same way
