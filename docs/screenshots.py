"""Make the screenshots of the documentation: real commands in a real terminal, real pages in Chromium.

    pip install pyte
    python docs/screenshots.py                                    # all: a few minutes on two cores
    SCREENSHOTS=FOLDER python docs/screenshots.py report predict  # some, with the photos and the run of an earlier call

The commands are those of the tutorial. Its photos are rendered by
examples/make_photos.py, so that all images may be shipped.
"""

import html
import importlib.util
import os
import pty
import select
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
TRAIN = "podscale train imagefolder-small --data.path fruit"
COLUMNS = 96
COLOURS = {"red": "#f58ca0", "green": "#6fcf97", "blue": "#7ab6f5", "cyan": "#5ccbd4", "magenta": "#c9a2f2"}
COLOURS |= {"brown": "#dcc25a", "white": "#e9edf1", "default": "#e9edf1", "black": "#8b96a3"}
STYLE = """
body { margin: 0; background: #14181d; } html { color-scheme: dark; }
pre { margin: 0; padding: 14px 18px 16px; color: #e9edf1; width: max-content; }
pre { font: 15px/1.42 "DejaVu Sans Mono", monospace; }
.prompt { color: #6fcf97; } b { font-weight: 700; }
"""


def load_module(path):
    """Return a Python file as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


Browser = load_module(ROOT / "tests" / "support" / "browser.py").Browser


# --- the terminal ---------------------------------------------------------------------------------------------------


def run_in_terminal(command, folder, until=None):
    """Run a command in a terminal and return its screen as lines of (text, colour, is bold).

    Args:
        command: the command line.
        folder: where it runs.
        until: a function of the screen's text; once it is true, the screen is returned and the command goes on to its
            end without being looked at.
    """
    import pyte

    screen = pyte.Screen(COLUMNS, 60)
    stream = pyte.ByteStream(screen)
    process, terminal = pty.fork()
    if not process:
        os.chdir(folder)
        os.environ |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "TERM": "xterm-256color"}
        os.execvp("bash", ["bash", "-c", command])
    termios.tcsetwinsize(terminal, (60, COLUMNS)) if hasattr(termios, "tcsetwinsize") else set_size(terminal)
    taken = None
    while True:
        select.select([terminal], [], [], 1)
        try:
            data = os.read(terminal, 1 << 16)
        except OSError:  # the command has ended
            break
        if not data:
            break
        stream.feed(data)
        if taken is None and until and until("\n".join(screen.display)):
            taken = read_screen(screen)
    os.waitpid(process, 0)
    os.close(terminal)
    return taken or read_screen(screen)


def set_size(terminal):
    import fcntl

    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 60, COLUMNS, 0, 0))


def read_screen(screen):
    """Return the lines of a screen, without the empty ones at its end."""
    lines = []
    for row in range(screen.lines):
        cells = [screen.buffer[row][column] for column in range(screen.columns)]
        lines.append([(cell.data, cell.fg, cell.bold) for cell in cells])
    while lines and not "".join(text for text, _, _ in lines[-1]).strip():
        lines.pop()
    return lines


def render_terminal(command, lines):
    """Return a terminal's content as an HTML page."""
    rows = [f'<span class="prompt">$</span> {html.escape(command)}']
    for line in lines:
        cells = ""
        for text, colour, bold in line:
            shown = COLOURS.get(colour, f"#{colour}" if len(colour) == 6 else COLOURS["default"])
            cell = html.escape(text)
            cell = f"<b>{cell}</b>" if bold else cell
            cells += cell if shown == COLOURS["default"] else f'<span style="color:{shown}">{cell}</span>'
        rows.append(cells.rstrip())
    text = "\n".join(rows)
    return f'<html lang="en" data-drawn="yes"><style>{STYLE}</style><pre>{text}</pre></html>'


# --- the browser ----------------------------------------------------------------------------------------------------


class Camera:
    """Takes screenshots of pages into docs/images, as small PNG files."""

    def __init__(self, browser, folder):
        self._browser, self._folder = browser, folder

    def save_page(self, name, address, selector=None, height=900, colours=96, **settings):
        """Save what a page shows first, or one of its elements."""
        raw = self._folder / "raw.png"
        with self._browser.open(address, height=height, reduced_motion=True, **settings) as tab:
            if selector:
                tab.locate(selector, down=0)
                tab.evaluate(
                    f"scrollTo(0, scrollY + document.querySelector({selector!r}).getBoundingClientRect().top - 12)"
                )
            time.sleep(0.4)
            tab.save_screenshot(raw, whole=False)
        self._save(raw, name, colours)

    def save_terminal(self, name, command, lines):
        """Save a terminal's content."""
        (self._folder / "terminal.html").write_text(render_terminal(command, lines))
        raw = self._folder / "raw.png"
        with self._browser.open((self._folder / "terminal.html").as_uri(), width=1000, height=1200) as tab:
            box = tab.evaluate(
                "(({ width, height }) => [width, height])(document.body.firstElementChild.getBoundingClientRect())"
            )
            tab.save_screenshot(raw, whole=False)
        with Image.open(raw) as image:
            image.crop((0, 0, *(int(side) for side in box))).save(raw)
        self._save(raw, name, 32)

    def _save(self, raw, name, colours):
        with Image.open(raw) as image:
            small = image.convert("RGB").quantize(colours, dither=Image.Dither.NONE)
            small.save(IMAGES / f"{name}.png", optimize=True)


# --- the screenshots ------------------------------------------------------------------------------------------------


def take_check(camera, folder):
    command = "podscale data check fruit"
    camera.save_terminal("check", command, run_in_terminal(command, folder))
    (folder / "fruit" / "plum" / "IMG_0031.jpg").unlink()
    (folder / "fruit" / "orange" / "IMG_0080 (copy).jpg").unlink()


def take_samples(camera, folder):
    command = "podscale data show imagefolder-small --data.path fruit --images 32"
    subprocess.run(["bash", "-c", f"{Path(sys.executable).parent}/{command}"], cwd=folder, check=True)
    camera._save(folder / "samples.png", "samples", 128)


def take_train(camera, folder):
    lines = run_in_terminal(TRAIN, folder, until=lambda text: "epoch 24.0: validation" in text)
    camera.save_terminal("train", TRAIN, lines)


def take_report(camera, folder):
    (path,) = (folder / "runs").glob("*/report.html")
    page = path.resolve().as_uri()
    camera.save_page("report", page, height=860)
    camera.save_page("report-dark", page, height=860, dark=True)
    camera.save_page("report-phone", page, width=390, height=844)
    camera.save_page("mistakes", page, selector="#evidence", height=760)


def take_predict(camera, folder):
    command = "podscale predict fruit/pear/IMG_0003.jpg fruit/plum/IMG_0010.jpg"
    camera.save_terminal("predict", command, run_in_terminal(command, folder))


def take_export(camera, folder):
    command = "podscale export --to fruit.onnx"
    camera.save_terminal("export", command, run_in_terminal(command, folder))


STEPS = {"check": take_check, "samples": take_samples, "train": take_train, "report": take_report}
STEPS |= {"predict": take_predict, "export": take_export}


def main(names):
    IMAGES.mkdir(exist_ok=True)
    folder = Path(os.environ.get("SCREENSHOTS", "") or tempfile.mkdtemp(prefix="podscale-screenshots-"))
    folder.mkdir(exist_ok=True)
    if not (folder / "fruit").exists():
        load_module(ROOT / "examples" / "make_photos.py").make_photos(folder / "fruit")
    with Browser() as browser:
        for name in names or STEPS:
            STEPS[name](Camera(browser, folder), folder)
            print(name, flush=True)
    if "SCREENSHOTS" not in os.environ:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main(sys.argv[1:])
