"""A tiny object store that speaks as much of the S3 protocol as reading needs, on loopback."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape


@dataclass
class ObjectStore:
    """Objects by "bucket/key", and the requests that came for them.

    Attributes:
        port: Where it listens on 127.0.0.1.
        objects: What it holds.
        requests: "METHOD path range" of every request.
    """

    port: int
    objects: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)

    def uri(self, path: str, credentials: str = "key:secret@") -> str:
        """Return the address of an object as pyarrow reads it."""
        options = f"endpoint_override=127.0.0.1:{self.port}&scheme=http&region=us-east-1"
        return f"s3://{credentials}{path}?{options}"


def _handler(store: ObjectStore) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._object(body=False)

        def do_GET(self) -> None:
            if parse_qs(urlsplit(self.path).query).get("list-type") == ["2"]:
                self._listing()
            else:
                self._object(body=True)

        def _object(self, *, body: bool) -> None:
            path = unquote(urlsplit(self.path).path).strip("/")
            wanted = self.headers.get("Range", "")
            store.requests.append(f"{self.command} {path} {wanted}".strip())
            data = store.objects.get(path)
            if data is None:
                found = "/" not in path and any(k.startswith(f"{path}/") for k in store.objects)
                self._answer(200 if found else 404, b"")
                return
            etag = sha256(data).hexdigest()
            if wanted and body:
                first, _, last = wanted.removeprefix("bytes=").partition("-")
                start, stop = int(first), min(int(last or len(data)), len(data) - 1) + 1
                span = f"bytes {start}-{stop - 1}/{len(data)}"
                self._answer(206, data[start:stop], {"Content-Range": span, "ETag": etag})
            else:
                self._answer(200, data if body else b"", {"ETag": etag}, len(data))

        def _listing(self) -> None:
            parts = urlsplit(self.path)
            bucket, query = parts.path.strip("/"), parse_qs(parts.query)
            prefix = query.get("prefix", [""])[0]
            delimiter = query.get("delimiter", [""])[0]
            store.requests.append(f"LIST {bucket}/{prefix}")
            keys = [k.removeprefix(f"{bucket}/") for k in sorted(store.objects)]
            rows, folders = [], set()
            for key in (k for k in keys if k.startswith(prefix)):
                rest = key[len(prefix) :]
                if delimiter and delimiter in rest:
                    folders.add(prefix + rest.split(delimiter)[0] + delimiter)
                else:
                    size = len(store.objects[f"{bucket}/{key}"])
                    rows.append(
                        f"<Contents><Key>{escape(key)}</Key><Size>{size}</Size>"
                        "<LastModified>2025-01-01T00:00:00.000Z</LastModified></Contents>"
                    )
            rows += [
                f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>"
                for folder in sorted(folders)
            ]
            text = (
                '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult>'
                f"<Name>{bucket}</Name><Prefix>{escape(prefix)}</Prefix>"
                f"<KeyCount>{len(rows)}</KeyCount><MaxKeys>1000</MaxKeys>"
                f"<IsTruncated>false</IsTruncated>{''.join(rows)}</ListBucketResult>"
            )
            self._answer(200, text.encode(), {"Content-Type": "application/xml"})

        def _answer(
            self,
            status: int,
            data: bytes,
            headers: dict[str, str] | None = None,
            length: int | None = None,
        ) -> None:
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Last-Modified", "Wed, 01 Jan 2025 00:00:00 GMT")
            self.send_header("Content-Length", str(len(data) if length is None else length))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    return Handler


@contextmanager
def object_store() -> Iterator[ObjectStore]:
    """Serve an empty store until the block ends."""
    store = ObjectStore(0)
    with ThreadingHTTPServer(("127.0.0.1", 0), _handler(store)) as server:
        store.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield store
        finally:
            server.shutdown()
            thread.join()
