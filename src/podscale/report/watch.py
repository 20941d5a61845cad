"""Serve a run's report on loopback, and refresh it while the run goes on.

The server is Python's own and listens on 127.0.0.1 only. It serves one page: the report, written again whenever the
run's metrics have changed. A frame around it asks every few seconds whether there is a newer one.
"""

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus

from podscale.errors import UserError
from podscale.report.page import render_report
from podscale.runs.folder import Run

LOOPBACK = "127.0.0.1"
POLL_MS = 3000
FRAME = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>Podscale: watching a run</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>html, body, iframe { margin: 0; border: 0; width: 100%; height: 100%; display: block; }</style></head>
<body><iframe src="report.html" title="The report of the run"></iframe>
<script>
let version = null;
setInterval(async () => {
  const response = await fetch("version").catch(() => null);
  if (!response || !response.ok) return;
  const now = await response.text(), frame = document.querySelector("iframe");
  if (version !== null && now !== version) {
    const top = frame.contentWindow.scrollY;
    frame.onload = () => frame.contentWindow.scrollTo(0, top);
    frame.contentWindow.location.reload();
  }
  version = now;
}, POLL);
</script></body></html>
""".replace("POLL", str(POLL_MS))


def read_version(run: Run) -> str:
    """Return a text that changes when there is something new to show."""
    files = (run.folder / name for name in ("metrics.jsonl", "findings.json", "summary.json"))
    return "-".join(f"{path.stat().st_mtime_ns}" if path.exists() else "0" for path in files)


@contextmanager
def serve_report(run: Run, port: int = 0) -> Iterator[str]:
    """Serve a run's report until the block ends, and yield its address.

    Args:
        run: the run.
        port: on 127.0.0.1; 0 for a free one.

    Raises:
        UserError: the port is in use.
    """

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.headers.get("Host", "").rpartition(":")[0] not in (LOOPBACK, "localhost"):
                self.send_error(HTTPStatus.FORBIDDEN)  # another site's name that leads here
                return
            try:
                pages = {"/": lambda: FRAME, "/report.html": lambda: render_report(run)}
                pages["/version"] = lambda: read_version(run)
                if self.path not in pages:
                    self.send_error(HTTPStatus.NOT_FOUND)
                    return
                self._send(pages[self.path](), "text/plain" if self.path == "/version" else "text/html")
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
