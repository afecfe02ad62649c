"""A registry of schemas: a real HTTP server with its answers, and nothing behind them."""

from __future__ import annotations

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


class SchemaServer:
    """`schemas`: by number, the answer. `subjects`: by `subject/version`. `user`: `name:password`
    that it asks for. `refuses`: the status of an attempt to register a schema; `says`: why."""

    def __init__(
        self,
        schemas: dict[int, dict[str, Any]],
        subjects: dict[str, dict[str, Any]] | None = None,
        user: str | None = None,
        refuses: int | None = None,
        says: str = "",
    ) -> None:
        self.schemas = schemas
        self.registered: dict[tuple[str, str], int] = {}  # by subject and schema
        self.requests: list[str] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def is_allowed(self) -> bool:
                server.requests.append(self.path)
                wanted = None if user is None else base64.b64encode(user.encode()).decode()
                if wanted is not None and self.headers["Authorization"] != f"Basic {wanted}":
                    self.send_error(401)
                    return False
                return True

            def do_POST(self) -> None:
                if not self.is_allowed():
                    return
                message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                schema = message["schema"]
                _, _, subject, *is_new = self.path.split("/")
                key = subject, schema
                if is_new and refuses is not None:
                    if says:
                        self.answer({"error_code": refuses, "message": says}, refuses)
                    else:
                        self.send_error(refuses)
                    return
                if is_new and key not in server.registered:
                    number = 1 + max(server.schemas, default=0)
                    server.schemas[number] = message
                    server.registered[key] = number
                if (known := server.registered.get(key)) is None:
                    self.answer(None)
                else:
                    self.answer({"id": known} if is_new else {"id": known, "version": 1})

            def do_GET(self) -> None:
                if not self.is_allowed():
                    return
                found: Any = ["AVRO"] if self.path == "/schemas/types" else None
                if self.path.startswith("/schemas/ids/"):
                    found = server.schemas.get(int(self.path.rpartition("/")[2]))
                elif self.path.startswith("/subjects/"):
                    _, _, subject, _, version = self.path.split("/")
                    found = (subjects or {}).get(f"{subject}/{version}")
                self.answer(found)

            def answer(self, found: Any, status: int = 200) -> None:
                if found is None:
                    self.send_error(404)
                    return
                body = json.dumps(found).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._http.shutdown()
        self._http.server_close()
