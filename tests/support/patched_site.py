"""A `sitecustomize` module that changes something in every process of a run, whatever starts the processes.

Python runs it at the start of every process that has its folder on PYTHONPATH.
"""

SITE = """
import importlib.abc, importlib.util, os, sys
from pathlib import Path

def find_number():
    if "--process" in sys.argv:
        return int(sys.argv[sys.argv.index("--process") + 1])
    return int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("SLURM_PROCID") or 0)

{patch}

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != {module!r}:
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


def write_site(folder, patch, module="podscale.training.loop"):
    """Write the module into a folder.

    Args:
        folder: is made.
        patch: source of a function `patch`, which may call `find_number` for the number of its process.
        module: `patch` is called as soon as this module has been imported.

    Returns:
        The folder, for PYTHONPATH.
    """
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(SITE.format(patch=patch, module=module))
    return folder
