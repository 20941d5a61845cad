"""Check pages with axe-core, in a real browser."""

import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest


def load_axe(folder):
    """Return the source of axe-core: from the file that PODSCALE_AXE names, or from npm; skip the test without both."""
    if named_file := os.environ.get("PODSCALE_AXE"):
        return Path(named_file).read_text()
    if shutil.which("npm") is None:
        pytest.skip("axe-core is not here: there is no npm to fetch it with, and PODSCALE_AXE names no file")
    try:
        subprocess.run(["npm", "pack", "axe-core@4"], cwd=folder, capture_output=True, timeout=60, check=True)
    except (subprocess.SubprocessError, OSError) as error:
        pytest.skip(f"axe-core could not be fetched: {error}")
    (archive,) = folder.glob("*.tgz")
    with tarfile.open(archive) as opened:
        return opened.extractfile("package/axe.min.js").read().decode()


def find_serious_violations(tab, axe):
    """Return impact, rule and element of what axe finds serious or critical in an open page."""
    tab.evaluate(axe + "; 0")
    result = tab.evaluate("axe.run().then((r) => r.violations.map((v) => [v.impact, v.id, v.nodes[0].html]))")
    return [violation for violation in result if violation[0] in ("serious", "critical")]
