"""A `sitecustomize` module that kills one process of a run at a moment of a save, whatever started it.

Python runs it at the start of every process that has its folder on PYTHONPATH. `write_dying_site` writes it.
"""

SITE = """
import importlib.abc, importlib.util, os, signal, sys
from pathlib import Path

moment, victim, marker = {moment!r}, {victim!r}, Path({marker!r})

def find_number():
    if "--process" in sys.argv:
        return sys.argv[sys.argv.index("--process") + 1]
    return os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("SLURM_PROCID")

def patch():
    from podscale.training.checkpoint import Checkpoints
    from podscale.training.checkpoint_save import BackgroundSave, Exchange
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

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "podscale.training.loop":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_patch(module):
            execute(module)
            patch()

        spec.loader.exec_module = execute_and_patch
        return spec

sys.meta_path.insert(0, Finder())
"""


def write_dying_site(folder, moment, victim):
    """Write the module into a folder; return the folder, for PYTHONPATH."""
    folder.mkdir()
    text = SITE.format(moment=moment, victim=str(victim), marker=str(folder / "died"))
    (folder / "sitecustomize.py").write_text(text)
    return folder
