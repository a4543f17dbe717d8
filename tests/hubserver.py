"""The Hugging Face Hub's buckets, and its Xet storage, on loopback: as much as the unmodified huggingface_hub
and hf_xet need to fill and read a bucket, and model repositories whose files are served by ranges.

Content goes the real way: hf_xet cuts it into chunks, packs these into xorbs, and tells in a shard of which
chunks a file is made; the server puts it together again from what it was sent.
"""

from __future__ import annotations

import hashlib
import json
import random
import socket
import struct
import threading
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import numpy as np
from faultproxy import QuietServer

__all__ = ["HubServer"]

TOKEN = "hf_loopbackloopbackloopback"
ENTRY = 48  # bytes of every record in a shard
END = b"\xff" * 32


@dataclass(slots=True)
class State:
    """What the Hub knows."""

    buckets: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    xorbs: dict[str, bytes] = field(default_factory=dict)
    files: dict[str, list[tuple[str, int, int]]] = field(default_factory=dict)
    models: dict[str, bytes] = field(
        default_factory=dict
    )  # "namespace/name/resolve/revision/path" -> content
    private: set[str] = field(default_factory=set)  # models that need the token
    lock: Any = field(default_factory=threading.RLock)
    counts: Counter[str] = field(default_factory=Counter)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)  # method, path, Authorization
    limited: float = 0.0  # how likely a request for a file is answered 429
    retry_after: str | None = "0"  # what such an answer says
    reset: int = 0
    random: random.Random = field(default_factory=lambda: random.Random(0))
    origin: str = ""  # the other server, to which content is redirected


class HubServer:
    """The servers, as a context manager: the Hub at `endpoint`, and one of another origin for content."""

    def __init__(self) -> None:
        self.state = State()
        self._servers = []
        for role in ("hub", "content"):
            handler = type("Handler", (_Handler,), {"state": self.state, "role": role})
            self._servers.append(QuietServer(("127.0.0.1", 0), handler))
        self.endpoint, self.state.origin = (f"http://127.0.0.1:{s.server_address[1]}" for s in self._servers)
        self._threads = [
            threading.Thread(target=s.serve_forever, args=(0.05,), daemon=True) for s in self._servers
        ]

    def __enter__(self) -> HubServer:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        for server, thread in zip(self._servers, self._threads, strict=True):
            server.shutdown()
            server.server_close()
            thread.join()

    def publish(
        self, repository: str, revision: str, path: str, content: bytes, *, private: bool = False
    ) -> None:
        """Make a file of a model repository at a revision."""
        key = f"{repository}/resolve/{revision}/{path}"
        self.state.models[key] = content
        if private:
            self.state.private.add(key)


def merkle_hex(raw: bytes) -> str:
    """A hash as Xet writes it: four little-endian words, each in hex."""
    return "".join(f"{word:016x}" for word in struct.unpack("<4Q", raw))


def files_of_shard(shard: bytes) -> dict[str, list[tuple[str, int, int]]]:
    """Of which chunks of which xorbs files are made: (xorb, first chunk, end)."""
    files: dict[str, list[tuple[str, int, int]]] = {}
    at = ENTRY  # behind the header
    while shard[at : at + 32] != END:
        digest, (flags, count) = merkle_hex(shard[at : at + 32]), struct.unpack_from("<II", shard, at + 32)
        at += ENTRY
        segments = []
        for _ in range(count):
            _, _, first, end = struct.unpack_from("<IIII", shard, at + 32)
            segments.append((merkle_hex(shard[at : at + 32]), first, end))
            at += ENTRY
        at += ENTRY * count * bool(flags & 1 << 31)  # checks of segments
        at += ENTRY * bool(flags & 1 << 30)  # a SHA-256
        files[digest] = segments
    return files


def chunks_of_xorb(xorb: bytes) -> list[bytes]:
    """A xorb's chunks, decompressed."""
    import pyarrow as pa

    chunks, at = [], 0
    while at + 8 <= len(xorb) and xorb[at : at + 7] != b"XETBLOB":
        size, scheme = int.from_bytes(xorb[at + 1 : at + 4], "little"), xorb[at + 4]
        whole = int.from_bytes(xorb[at + 5 : at + 8], "little")
        data = xorb[at + 8 : at + 8 + size]
        if scheme:
            data = pa.decompress(data, decompressed_size=whole, codec="lz4", asbytes=True)
        if scheme == 2:  # the bytes are grouped by their place in words of four
            groups, out, start = np.frombuffer(data, np.uint8), np.empty(whole, np.uint8), 0
            for place in range(4):
                count = len(range(place, whole, 4))
                out[place::4] = groups[start : start + count]
                start += count
            data = out.tobytes()
        chunks.append(data)
        at += 8 + size
    return chunks


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16
    state: State
    role: str

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is printed."""

    def _serve(self) -> None:
        body = self._read()
        url = urlsplit(self.path)
        parts = [unquote(part) for part in url.path.strip("/").split("/")]
        with self.state.lock:
            self.state.requests.append((self.command, url.path, self.headers.get("authorization")))
            kind = "content" if self.role == "content" else "resolve" if "resolve" in parts else parts[0]
            limited = kind == "resolve" and self.state.random.random() < self.state.limited
            self.state.counts["429" if limited else kind] += 1
            if limited:
                after = {} if self.state.retry_after is None else {"retry-after": self.state.retry_after}
                return self._say(429, b"", {"ratelimit": f'"resolvers";r=0;t={self.state.reset}', **after})
            if self.role == "content":
                return self._content(parts)
            if parts[0] in ("v1", "v2"):
                return self._xet(parts, body)
            if parts[:2] == ["api", "buckets"]:
                return self._api(parts[2:], body, parse_qs(url.query))
            if parts[0] == "buckets" and "resolve" in parts:
                return self._resolve_bucket("/".join(parts[1:3]), "/".join(parts[4:]))
            if parts[:2] == ["api", "models"]:
                return self._model_info("/".join(parts[2:4]), *parts[4:6])
            return self._resolve_model("/".join(parts))

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _serve  # noqa: N815 - the names that the server calls

    def _read(self) -> bytes:
        if self.headers.get("transfer-encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("content-length") or 0))
        data = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    # -- the Hub ---------------------------------------------------------------------------------------------

    def _api(self, parts: list[str], body: bytes, query: dict[str, list[str]]) -> None:
        if self.headers.get("authorization") != f"Bearer {TOKEN}":
            return self._refuse(401, "")
        name, rest = "/".join(parts[:2]), parts[2:]
        if self.command == "POST" and not rest:
            self.state.buckets.setdefault(name, {})
            return self._json({"url": f"http://hub/buckets/{name}", "id": name})
        bucket = self.state.buckets.get(name)
        if bucket is None:
            return self._refuse(404, "RepoNotFound")
        if rest[:1] in (["xet-write-token"], ["xet-read-token"]):
            host = f"http://{self.headers['host']}"
            given = {
                "X-Xet-Cas-Url": host,
                "X-Xet-Access-Token": "t",
                "X-Xet-Token-Expiration": "4" + "0" * 9,
            }
            return self._json({"casUrl": host, "accessToken": "t", "exp": 4_000_000_000}, given)
        if rest[:1] == ["batch"]:
            return self._batch(bucket, [json.loads(line) for line in body.splitlines()])
        if rest[:1] == ["paths-info"]:
            found = [bucket[path] for path in json.loads(body)["paths"] if path in bucket]
            return self._json(found)
        if rest[:1] == ["tree"]:
            prefix = "/".join(rest[1:])
            return self._page(
                [entry for path, entry in sorted(bucket.items()) if path.startswith(prefix)], query
            )
        if not rest:
            return self._json({"id": name, "private": False, "createdAt": now(), "size": 0, "totalFiles": 0})
        return self._refuse(404, "")

    def _page(self, entries: list[dict[str, Any]], query: dict[str, list[str]]) -> None:
        start = int(query.get("cursor", ["0"])[0])
        more = {}
        if start + 100 < len(entries):
            url = (
                f"http://{self.headers['host']}{urlsplit(self.path).path}?recursive=True&cursor={start + 100}"
            )
            more = {"link": f'<{url}>; rel="next"'}
        self._json(entries[start : start + 100], more)

    def _batch(self, bucket: dict[str, dict[str, Any]], operations: list[dict[str, Any]]) -> None:
        failed = []
        for operation in operations:
            path = operation["path"]
            if operation["type"] == "deleteFile":
                if bucket.pop(path, None) is None:
                    failed.append({"path": path, "error": "no such file"})
                continue
            digest = operation["xetHash"]
            size = len(self._file(digest))
            bucket[path] = {
                "type": "file", "path": path, "size": size, "xetHash": digest,
                "mtime": "2020-01-01T00:00:00.000Z", "uploadedAt": now(),
            }  # fmt: skip
        self._json({"success": not failed, "processed": len(operations), "failed": failed})

    def _resolve_bucket(self, name: str, path: str) -> None:
        if self.headers.get("authorization") != f"Bearer {TOKEN}":
            return self._refuse(401, "")
        if name not in self.state.buckets:
            return self._refuse(404, "RepoNotFound")
        entry = self.state.buckets[name].get(path)
        if entry is None:
            return self._refuse(404, "EntryNotFound")
        digest = entry["xetHash"]
        headers = {"x-xet-hash": digest, "x-linked-size": str(entry["size"])}
        return self._say(
            302, b"", {**headers, "location": f"{self.state.origin}/xet/{digest}?X-Signature=secret"}
        )

    def _model_info(self, repository: str, what: str = "revision", revision: str = "main") -> None:
        names = [key.split("/", 4) for key in self.state.models if key.startswith(f"{repository}/resolve/")]
        found = [(parts[3], parts[4]) for parts in names if revision in ("main", parts[3])]
        if not found:
            return self._refuse(404, "RevisionNotFound" if names else "RepoNotFound")
        paths = [path for commit, path in found if commit == found[0][0]]
        if what == "tree":
            sizes = {
                path: len(self.state.models[f"{repository}/resolve/{found[0][0]}/{path}"]) for path in paths
            }
            return self._json(
                [
                    {"type": "file", "path": path, "size": size, "oid": "0" * 40}
                    for path, size in sizes.items()
                ]
            )
        files = [{"rfilename": path} for path in paths]
        return self._json({"id": repository, "modelId": repository, "sha": found[0][0], "siblings": files})

    def _resolve_model(self, key: str) -> None:
        content = self.state.models.get(key)
        token = self.headers.get("authorization")
        if content is None:
            repository = key.partition("/resolve/")[0]
            known = any(model.startswith(f"{repository}/") for model in self.state.models)
            return self._refuse(404, "EntryNotFound" if known else "RepoNotFound")
        if key in self.state.private and token != f"Bearer {TOKEN}":
            return self._refuse(401, "GatedRepo")
        etag, commit = hashlib.sha256(content).hexdigest(), key.split("/")[3]
        headers = {"etag": f'"{etag}"', "x-repo-commit": commit, "x-linked-size": str(len(content))}
        place = f"{self.state.origin}/model/{key}?X-Signature=secret"
        return self._say(302, b"", {**headers, "location": place})

    # -- Xet storage, and what content is redirected to ------------------------------------------------------

    def _xet(self, parts: list[str], body: bytes) -> None:
        if parts[1] == "xorbs" and self.command == "POST":
            self.state.xorbs[parts[-1]] = body
            return self._json({"was_inserted": True})
        if parts[1] == "shards" and self.command == "POST":
            self.state.files |= files_of_shard(body)
            done = b'{"type":"result","result":1}\n'
            return self._say(200, done, {"content-type": "application/x-ndjson"})
        return self._refuse(404, "")

    def _file(self, digest: str) -> bytes:
        return b"".join(
            b"".join(chunks_of_xorb(self.state.xorbs[xorb])[first:end])
            for xorb, first, end in self.state.files.get(digest, [])
        )

    def _content(self, parts: list[str]) -> None:
        data = self._file(parts[1]) if parts[0] == "xet" else self.state.models["/".join(parts[1:])]
        wanted = self.headers.get("range")
        if not wanted:
            return self._say(200, data, {})
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        start, end = int(first), min(int(last or len(data) - 1) + 1, len(data))
        if start >= len(data):
            return self._say(416, b"", {})
        return self._say(206, data[start:end], {"content-range": f"bytes {start}-{end - 1}/{len(data)}"})

    # -- replies ---------------------------------------------------------------------------------------------

    def _json(self, value: Any, headers: dict[str, str] | None = None) -> None:
        self._say(200, json.dumps(value).encode(), {"content-type": "application/json", **(headers or {})})

    def _refuse(self, status: int, code: str) -> None:
        self._say(status, b"{}", {"x-error-code": code} if code else {})

    def _say(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
        self.wfile.flush()


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
