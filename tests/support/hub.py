"""A stand-in for the hub on loopback: what the hub client asks of a model repository, and nothing more."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Serves directories as repositories: ``with Hub({"someone/model": path}) as hub: ... hub.url``.

    `cut` is how many bytes of a safetensors file go out before the connection breaks, the next `cuts` times that it is
    asked for. `wrong` lets a safetensors file go out with one bit changed. `requests` lists what was asked: method,
    path and range.
    """

    def __init__(self, repositories: dict[str, Path], *, aliases: dict[str, str] | None = None) -> None:
        self.repositories = repositories
        self.aliases = aliases or {}
        self.cut = 0
        self.cuts = 0
        self.wrong = False
        self.requests: list[tuple[str, str, str | None]] = []

    def __enter__(self) -> "Hub":
        hub = self

        class Handler(_Handler):
            serves = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def asked(self, method: str, ending: str) -> list[str | None]:
        """The ranges of the requests for a file, in order."""
        return [asked for verb, path, asked in self.requests if verb == method and path.endswith(ending)]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    serves: Hub

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        hub, path = self.serves, unquote(urlsplit(self.path).path)
        hub.requests.append((self.command, path, self.headers.get("Range")))
        for short, full in hub.aliases.items():
            if f"{path}/".startswith((f"/api/models/{short}/", f"/{short}/resolve/")):
                self._send(307, {"Location": self.path.replace(f"/{short}", f"/{full}", 1)}, b"", body)
                return
        for name, directory in hub.repositories.items():
            if path in (f"/api/models/{name}", f"/api/models/{name}/revision/main"):
                files = [{"rfilename": file.name} for file in sorted(directory.iterdir())]
                self._json({"id": name, "sha": COMMIT, "siblings": files}, body)
                return
            if path.startswith(f"/api/models/{name}/tree/"):
                self._json([_entry(file) for file in sorted(directory.iterdir())], body)
                return
            if path.startswith(f"/{name}/resolve/"):
                self._file(directory / path.rsplit("/", 1)[1], body)
                return
        self._send(404, {"X-Error-Code": "RepoNotFound"}, b"", body)

    def _json(self, value: object, body: bool) -> None:
        self._send(200, {"Content-Type": "application/json"}, json.dumps(value).encode(), body)

    def _file(self, file: Path, body: bool) -> None:
        if not file.is_file():
            self._send(404, {"X-Error-Code": "EntryNotFound"}, b"", body)
            return
        content = file.read_bytes()
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{_etag(file)}"', "Accept-Ranges": "bytes"}
        if not body:
            self._send(200, headers, content, body)
            return
        large = file.suffix == ".safetensors"
        if large and self.serves.wrong:
            content = content[:-1] + bytes([content[-1] ^ 1])
        first, status = 0, 200
        if asked := self.headers.get("Range"):
            first = int(asked.removeprefix("bytes=").partition("-")[0])
            status = 206
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
        if large and self.serves.cuts > 0:
            self.serves.cuts -= 1
            end = max(first, self.serves.cut)
            self._head(status, headers | {"Content-Length": str(len(content) - first)})
            self.wfile.write(content[first:end])
            self.close_connection = True
            return
        self._send(status, headers, content[first:], body)

    def _send(self, status: int, headers: dict[str, str], content: bytes, body: bool) -> None:
        self._head(status, headers | {"Content-Length": str(len(content))})
        if body:
            self.wfile.write(content)

    def _head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()


def _etag(file: Path) -> str:
    """The SHA-256 of large files, the SHA-1 of a git blob of small ones: what the hub gives."""
    content = file.read_bytes()
    if file.suffix == ".safetensors":
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()


def _entry(file: Path) -> dict[str, object]:
    entry: dict[str, object] = {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": _etag(file)}
    if file.suffix == ".safetensors":
        entry["lfs"] = {"oid": _etag(file), "size": file.stat().st_size, "pointerSize": 134}
    return entry
