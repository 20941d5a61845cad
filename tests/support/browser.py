"""Open pages in a real browser: headless Chromium, controlled over its debugging pipe.

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
    """One browser process; each open page is a tab."""

    def __init__(self):
        self._profile = tempfile.TemporaryDirectory(prefix="podscale-browser-", ignore_cleanup_errors=True)
        (browser_in, self._out), (self._in, browser_out) = os.pipe(), os.pipe()
        # The browser reads commands from file 3 and writes replies to file 4.
        options = ("--remote-debugging-pipe", f"--user-data-dir={self._profile.name}")
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec 3<&{browser_in} 4>&{browser_out}; exec "$@"', "-", BINARY, *QUIET.split(), *options],
            pass_fds=(browser_in, browser_out),
            stderr=subprocess.DEVNULL,
        )
        os.close(browser_in)
        os.close(browser_out)
        self._unread, self._number, self.events = b"", 0, []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.send("Browser.close")
        self._process.wait(20)
        os.close(self._in)
        os.close(self._out)
        self._profile.cleanup()

    def send(self, method, session=None, **parameters):
        """Send one command and wait for its reply."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        os.write(self._out, json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0")
        while True:
            reply = self._read_message()
            if reply.get("id") == self._number:
                assert "error" not in reply, f"{method}: {reply['error']}"
                return reply["result"]
            self.events.append(reply)

    def _read_message(self):
        while b"\0" not in self._unread:
            data = os.read(self._in, 1 << 20)
            assert data, "the browser has ended"
            self._unread += data
        message, _, self._unread = self._unread.partition(b"\0")
        return json.loads(message)

    @contextmanager
    def open(self, address, width=1100, height=900, dark=False, reduced_motion=False, ready="yes"):
        """Yield a tab with the page at `address`, once drawn (<html data-drawn>), or loaded if `ready` is None."""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = Tab(self, session)
        try:
            for domain in ("Page", "Runtime", "Log"):
                tab.send(f"{domain}.enable")
            tab.send(
                "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
            )
            preferences = {"prefers-color-scheme": "dark" if dark else "light"}
            preferences["prefers-reduced-motion"] = "reduce" if reduced_motion else "no-preference"
            features = [{"name": name, "value": value} for name, value in preferences.items()]
            tab.send("Emulation.setEmulatedMedia", features=features)
            tab.send("Page.navigate", url=address)
            drawn = f"document.documentElement?.dataset.drawn === '{ready}'"
            tab.wait_for(
                "location.href !== 'about:blank' && document.readyState === 'complete'" if ready is None else drawn
            )
            yield tab
        finally:
            self.send("Target.closeTarget", targetId=target)


class Tab:
    """One open page."""

    def __init__(self, browser, session):
        self._browser, self._session = browser, session

    def send(self, method, **parameters):
        return self._browser.send(method, self._session, **parameters)

    def evaluate(self, expression):
        """Return the value of a JavaScript expression, awaited if it is a promise."""
        reply = self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in reply, reply["exceptionDetails"]
        return reply["result"].get("value")

    def wait_for(self, expression, limit_s=20):
        """Wait until a JavaScript expression is true."""
        end = time.monotonic() + limit_s
        while not self.evaluate(expression):
            assert time.monotonic() < end, f"never true: {expression}; {self.problems}"
            time.sleep(0.02)

    @property
    def problems(self):
        """Errors and warnings on the page's console, and uncaught errors."""
        self.evaluate("0")  # all events so far have arrived before its reply
        events = [event for event in self._browser.events if event.get("sessionId") == self._session]
        problems = [str(e["params"]) for e in events if e["method"] == "Runtime.exceptionThrown"]
        problems += [str(e["params"]) for e in events if e["method"] == "Log.entryAdded"]
        calls = [e["params"] for e in events if e["method"] == "Runtime.consoleAPICalled"]
        problems += [str(call) for call in calls if call["type"] in ("error", "warning", "assert")]
        error = self.evaluate("document.documentElement.dataset.error || ''")
        return problems + ([error] if error else [])

    def locate(self, selector, across=0.5, down=0.5):
        """Scroll an element into view and return a point inside it."""
        return self.evaluate(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            f" e.scrollIntoView({{block: 'center'}}); const b = e.getBoundingClientRect();"
            f" return [b.left + b.width * {across}, b.top + b.height * {down}]; }})()"
        )

    def hover(self, selector, across=0.5, down=0.5):
        """Move the mouse to a point of an element."""
        x, y = self.locate(selector, across, down)
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, selector):
        x, y = self.locate(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def read_text(self, selector="body"):
        return self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText")

    def list_attributes(self, selector, attribute):
        """Return an attribute of every matching element."""
        elements = f"[...document.querySelectorAll({json.dumps(selector)})]"
        return self.evaluate(f"{elements}.map((e) => e.getAttribute({json.dumps(attribute)}))")

    def count(self, selector):
        return self.evaluate(f"document.querySelectorAll({json.dumps(selector)}).length")

    def save_screenshot(self, path, whole=True):
        """Save a PNG of the whole page, or of the visible part."""
        screenshot = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(screenshot["data"]))
