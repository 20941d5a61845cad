"""Serve a run's report on loopback, and refresh it during the run.

The server is Python's own and listens on 127.0.0.1 only. It serves one page: the report, written again whenever the
run's metrics have changed. A frame around it asks every few seconds whether there is a newer one. A reload keeps
what the reader has opened, set and scrolled to. A run in a bucket is read again at most every `PULL_S` seconds, and
only while somebody asks.
"""

import http.server
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus

from podscale.errors import UserError
from podscale.report.page import render_report
from podscale.runs.bucket import find_bucket
from podscale.runs.folder import Run

LOOPBACK = "127.0.0.1"
POLL_MS = 3000
RELOAD_MS = 15_000  # least time between two reloads: every step changes the metrics
PULL_S = 10.0
FRAME = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>Podscale: watching a run</title>
<link rel="icon" href="data:,"><meta name="viewport" content="width=device-width, initial-scale=1">
<style>html, body, iframe { margin: 0; border: 0; width: 100%; height: 100%; display: block; }</style></head>
<body><iframe src="report.html" title="The report of the run"></iframe>
<script>
let version = null, reloaded = Date.now();
const frame = document.querySelector("iframe");
const label = (details) => details.querySelector("summary").textContent.replace(/[\\d,]/g, "");
function saveView(page) {
  const playing = page.getElementById("play")?.textContent === "Pause";
  const inputs = [...page.querySelectorAll("input")].filter((input) => input.id !== "hop" || !playing);
  return {
    open: [...page.querySelectorAll("details[open]")].map(label),
    inputs: inputs.map((input) => [input.id, input.value, input.checked]),
    top: frame.contentWindow.scrollY,
  };
}
function restoreView(page, view) {
  page.querySelectorAll("details").forEach((details) => { details.open ||= view.open.includes(label(details)); });
  for (const [id, value, checked] of view.inputs) {
    const input = page.getElementById(id);
    if (!input || (input.value === value && input.checked === checked)) continue;
    [input.value, input.checked] = [value, checked];
    input.dispatchEvent(new Event("input", { bubbles: true }));
  }
  frame.contentWindow.scrollTo(0, view.top);
}
function reload() {
  const view = saveView(frame.contentDocument);
  frame.onload = () => restoreView(frame.contentDocument, view);
  frame.contentWindow.location.reload();
  reloaded = Date.now();
}
setInterval(async () => {
  const response = await fetch("version").catch(() => null);
  if (!response || !response.ok) return;
  const now = await response.text();
  if (version !== null && now !== version && Date.now() - reloaded < RELOAD) return;  // soon
  if (version !== null && now !== version) reload();
  version = now;
}, POLL);
</script></body></html>
""".replace("POLL", str(POLL_MS)).replace("RELOAD", str(RELOAD_MS))


def read_version(run: Run) -> str:
    """Return a text that changes when there is something new to show."""
    files = [run.folder / name for name in ("metrics.jsonl", "findings.json", "summary.json")]
    if find_bucket(run.folder) is not None:  # the copy's files are all written again
        return "-".join(f"{zlib.crc32(path.read_bytes())}" if path.exists() else "0" for path in files)
    return "-".join(f"{path.stat().st_mtime_ns}" if path.exists() else "0" for path in files)


class _Pages:
    """The pages of a run, one at a time; a run in a bucket is brought up to date first."""

    def __init__(self, run: Run) -> None:
        self._run, self._bucket = run, find_bucket(run.folder)
        self._pulled, self._lock = time.monotonic(), threading.Lock()

    def make(self, path: str) -> str | None:
        """Return a page; None if there is none of this path.

        Raises:
            UserError, OSError: the run cannot be read.
        """
        with self._lock:
            if self._bucket is not None and time.monotonic() - self._pulled >= PULL_S:
                try:
                    self._bucket.pull()
                finally:
                    self._pulled = time.monotonic()
            pages = {"/report.html": render_report, "/version": read_version}
            return FRAME if path == "/" else pages[path](self._run) if path in pages else None


@contextmanager
def serve_report(run: Run, port: int = 0) -> Iterator[str]:
    """Serve a run's report until the block ends, and yield its address.

    Args:
        run: the run.
        port: on 127.0.0.1; 0 for a free one.

    Raises:
        UserError: the port is in use.
    """

    pages = _Pages(run)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.headers.get("Host", "").rpartition(":")[0] not in (LOOPBACK, "localhost"):
                self.send_error(HTTPStatus.FORBIDDEN)  # another site's name that leads here
                return
            try:
                page = pages.make(self.path)
                if page is None:
                    self.send_error(HTTPStatus.NOT_FOUND)
                    return
                self._send(page, "text/plain" if self.path == "/version" else "text/html")
            except (UserError, OSError) as error:
                self.send_error(HTTPStatus.INTERNAL_SERVER_ERROR, explain=str(error))

        def _send(self, text: str, kind: str) -> None:
            data = text.encode()
            self.send_response(HTTPStatus.OK)
            for name, value in (("Content-Type", f"{kind}; charset=utf-8"), ("Content-Length", str(len(data)))):
                self.send_header(name, value)
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing: a request every few seconds is no news."""

    try:
        server = http.server.ThreadingHTTPServer((LOOPBACK, port), Handler)
    except OverflowError:
        raise UserError(f"--port must be from 0 to 65535, not {port}") from None
    except OSError as error:
        raise UserError(f"cannot serve on port {port}: {error.strerror}; choose another with --port") from None
    thread = threading.Thread(target=server.serve_forever, name="podscale-watch", daemon=True)
    thread.start()
    try:
        yield f"http://{LOOPBACK}:{server.server_address[1]}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
