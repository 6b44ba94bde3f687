"""A fault injector: an HTTP proxy that answers with the failures it was told to, and forwards everything else."""

from __future__ import annotations

import http.client
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class FaultInjector:
    """`fail(path, status, times)` makes the next calls of a path fail; an empty path means every path."""

    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        self.calls: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self._faults: dict[str, tuple[int, int]] = {}
        self._lock = threading.Lock()
        injector = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                injector.handle(self)

            do_POST = do_GET

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def fail(self, path: str, status: int, times: int) -> None:
        with self._lock:
            self._faults[path] = (status, times)

    def heal(self) -> None:
        with self._lock:
            self._faults.clear()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def handle(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("Content-Length", 0)))
        status = self._fault(request.path)
        if status:
            answer, kind = b"injected failure", "text/plain"
        else:
            status, answer, kind = self._forward(request, body)
        request.send_response(status)
        request.send_header("Content-Type", kind)
        request.send_header("Content-Length", str(len(answer)))
        request.end_headers()
        request.wfile.write(answer)

    def _fault(self, path: str) -> int:
        with self._lock:
            self.calls[path] += 1
            for key in (path, ""):
                status, times = self._faults.get(key, (0, 0))
                if times:
                    self._faults[key] = (status, times - 1)
                    self.failed[path] += 1
                    return status
        return 0

    def _forward(self, request: BaseHTTPRequestHandler, body: bytes) -> tuple[int, bytes, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.target_port, timeout=120)
        try:
            connection.request(request.command, request.path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read(), response.getheader("Content-Type", "application/json")
        except (OSError, http.client.HTTPException) as error:
            return 502, f"no answer from the server: {error}".encode(), "text/plain"
        finally:
            connection.close()
