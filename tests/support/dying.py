"""A site (see `patched_site`) that kills one process of a run at a moment of a save, whatever started it."""

from support.patched_site import write_site

PATCH = """
import signal

moment, victim, marker = {moment!r}, {victim!r}, Path({marker!r})

def patch():
    from podscale.training.checkpoint.checkpoints import Checkpoints
    from podscale.training.checkpoint.save import BackgroundSave, Exchange
    saves = []

    def save(self, *args, work=Checkpoints.save, **more):
        saves.append(args[0])
        return work(self, *args, **more)

    def die_before(kind, name):
        work = getattr(kind, name)

        def die_or_work(*args, **more):
            if len(saves) >= 2 and find_number() == victim and not marker.exists():
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return work(*args, **more)

        setattr(kind, name, die_or_work)

    Checkpoints.save = save
    moments = {{"start": (BackgroundSave, "_write_part"), "written": (Exchange, "report")}}
    die_before(*moments.get(moment, (Exchange, "await_decision")))
"""


def write_dying_site(folder, moment, victim):
    """Write the site into a folder, where a file `died` records that the process has died; return the folder."""
    return write_site(folder, PATCH.format(moment=moment, victim=victim, marker=str(folder / "died")))
