"""A `sitecustomize` module that makes the disk slow to flush, so that a fault can come while a checkpoint is written.

Python runs it at the start of every process that has its folder on PYTHONPATH. `write_slow_site` writes it.
"""

SITE = """
import os, time

def fsync(*args, work=os.fsync):
    time.sleep({flush_s})
    return work(*args)

os.fsync = fsync
"""
FLUSH_S = 0.05  # for each file; looking for files that are being written takes less


def write_slow_site(folder):
    """Write the module into a folder; return the folder, for PYTHONPATH."""
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(SITE.format(flush_s=FLUSH_S))
    return folder
