"""A real browser to open pages with: headless Chromium, driven over its debugging pipe.

with Browser() as browser, browser.open(path.as_uri(), width=390, dark=True) as tab:
    tab.hover("#plot-loss svg", 0.5)
    assert tab.problems == []
"""

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from contextlib import contextmanager

BINARY = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
QUIET = "--headless=new --no-sandbox --no-first-run --disable-background-networking --disable-sync --disable-gpu"


class Browser:
    """One browser process; its pages are tabs of it."""

    def __init__(self):
        self._profile = tempfile.TemporaryDirectory(prefix="podscale-browser-", ignore_cleanup_errors=True)
        (here_in, self._out), (self._in, here_out) = os.pipe(), os.pipe()
        own = ("--remote-debugging-pipe", f"--user-data-dir={self._profile.name}")  # reads from 3, answers on 4
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec 3<&{here_in} 4>&{here_out}; exec "$@"', "-", BINARY, *QUIET.split(), *own],
            pass_fds=(here_in, here_out),
            stderr=subprocess.DEVNULL,
        )
        os.close(here_in)
        os.close(here_out)
        self._unread, self._number, self.events = b"", 0, []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.ask("Browser.close")
        self._process.wait(20)
        os.close(self._in)
        os.close(self._out)
        self._profile.cleanup()

    def ask(self, method, session=None, **parameters):
        """Sends one command and waits for its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        os.write(self._out, json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("id") == self._number:
                assert "error" not in found, f"{method}: {found['error']}"
                return found["result"]
            self.events.append(found)

    def _next(self):
        while b"\0" not in self._unread:
            data = os.read(self._in, 1 << 20)
            assert data, "the browser has gone away"
            self._unread += data
        message, _, self._unread = self._unread.partition(b"\0")
        return json.loads(message)

    @contextmanager
    def open(self, address, width=1100, height=900, dark=False, still=False, ready="yes"):
        """A tab with the page at `address`, once its script says on <html data-drawn> that it is done."""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = Tab(self, session)
        try:
            for domain in ("Page", "Runtime", "Log"):
                tab.ask(f"{domain}.enable")
            tab.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
            wishes = {"prefers-color-scheme": "dark" if dark else "light"}
            wishes["prefers-reduced-motion"] = "reduce" if still else "no-preference"
            features = [{"name": name, "value": value} for name, value in wishes.items()]
            tab.ask("Emulation.setEmulatedMedia", features=features)
            tab.ask("Page.navigate", url=address)
            tab.wait_for(f"document.documentElement?.dataset.drawn === '{ready}'")
            yield tab
        finally:
            self.ask("Target.closeTarget", targetId=target)


class Tab:
    """One open page."""

    def __init__(self, browser, session):
        self._browser, self._session = browser, session

    def ask(self, method, **parameters):
        return self._browser.ask(method, self._session, **parameters)

    def value(self, expression):
        """What a JavaScript expression gives, awaited if it is a promise."""
        found = self.ask("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait_for(self, expression, limit_s=20):
        """Until a JavaScript expression is true."""
        end = time.monotonic() + limit_s
        while not self.value(expression):
            assert time.monotonic() < end, f"it never came: {expression}; {self.problems}"
            time.sleep(0.02)

    @property
    def problems(self):
        """Whatever the page's console was told in anger, and errors that nobody caught."""
        self.value("0")  # events so far have arrived with the answer
        mine = [event for event in self._browser.events if event.get("sessionId") == self._session]
        found = [str(e["params"]) for e in mine if e["method"] == "Runtime.exceptionThrown"]
        found += [str(e["params"]) for e in mine if e["method"] == "Log.entryAdded"]
        calls = [e["params"] for e in mine if e["method"] == "Runtime.consoleAPICalled"]
        found += [str(call) for call in calls if call["type"] in ("error", "warning", "assert")]
        error = self.value("document.documentElement.dataset.error || ''")
        return found + ([error] if error else [])

    def place(self, selector, across=0.5, down=0.5):
        """A point inside an element, scrolled into view."""
        return self.value(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            f" e.scrollIntoView({{block: 'center'}}); const b = e.getBoundingClientRect();"
            f" return [b.left + b.width * {across}, b.top + b.height * {down}]; }})()"
        )

    def hover(self, selector, across=0.5, down=0.5):
        """Moves the mouse there."""
        x, y = self.place(selector, across, down)
        self.ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, selector):
        x, y = self.place(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def text(self, selector="body"):
        return self.value(f"document.querySelector({json.dumps(selector)}).innerText")

    def all(self, selector, attribute):
        """An attribute of every element that there is of this kind."""
        elements = f"[...document.querySelectorAll({json.dumps(selector)})]"
        return self.value(f"{elements}.map((e) => e.getAttribute({json.dumps(attribute)}))")

    def count(self, selector):
        return self.value(f"document.querySelectorAll({json.dumps(selector)}).length")

    def picture(self, path, whole=True):
        """A screenshot as PNG: of the whole page, or of what is in view."""
        found = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))
