"""A real S3 server for tests: Ceph's radosgw from Debian, with one monitor and one memory-backed OSD, on
loopback; about two seconds to start, nothing left behind.

    python tests/radosgw.py DIRECTORY        # prints endpoint and keys, runs until stdin ends
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

PROGRAMS = ("ceph-mon", "ceph-osd", "radosgw", "radosgw-admin", "ceph", "monmaptool", "ceph-authtool")
START_SECONDS = 60

# What takes it from 12 seconds to start to 2: no waiting for proposals, one small pool layout, no autoscaler.
CONFIGURATION = """\
[global]
fsid = {fsid}
run dir = {root}
log file = {root}/$name.log
admin socket = {root}/$name.asok
pid file = {root}/$name.pid
mon initial members = a
mon host = v2:127.0.0.1:{mon_port}
auth allow insecure global id reclaim = false
mon allow pool size one = true
mon warn on pool no redundancy = false
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd pool default pgp num = 4
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
keyring = {root}/keyring
public addr = 127.0.0.1
cluster addr = 127.0.0.1
ms bind ipv6 = false

[mon]
mon data = {root}/mon
paxos propose interval = 0.05
paxos min wait = 0.01
mon data avail warn = 0
mon data avail crit = 0

[osd]
osd data = {root}/osd
osd objectstore = memstore
memstore device bytes = 4294967296
osd memory target = 939524096

[client.rgw]
rgw frontends = beast endpoint=127.0.0.1:{rgw_port} tcp_nodelay=1
rgw override bucket index max shards = 1
rgw data = {root}/rgw
rgw run sync thread = false
rgw thread pool size = 64
"""


@dataclass(frozen=True, slots=True)
class S3Server:
    """Where a server is and who may use it: `access_key` everything, `reader_*` nothing of its own."""

    endpoint: str
    access_key: str
    secret_key: str
    reader_key: str
    reader_secret: str

    def options(self, *, reader: bool = False, **more: str) -> dict[str, str]:
        """`storage_options` for `s3://` URLs."""
        keys = (self.reader_key, self.reader_secret) if reader else (self.access_key, self.secret_key)
        return {"endpoint": self.endpoint, "access_key_id": keys[0], "secret_access_key": keys[1], **more}


def why_not() -> str | None:
    """Why the server cannot run here; None if it can."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    return (
        f"not installed: {', '.join(missing)} (apt-get install radosgw ceph-mon ceph-osd)"
        if missing
        else None
    )


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def start(root: Path) -> S3Server:
    """Start the server's programs in `root`, a new directory with a short path; stop them with `stop`."""
    root.mkdir(parents=True, exist_ok=True)
    keys = [secrets.token_hex(10) for _ in range(4)]
    fsid, mon_port, rgw_port = str(uuid.uuid4()), free_port(), free_port()
    configuration = root / "ceph.conf"
    configuration.write_text(CONFIGURATION.format(fsid=fsid, root=root, mon_port=mon_port, rgw_port=rgw_port))
    for name in ("mon", "osd", "rgw"):
        (root / name).mkdir()

    def run(*command: str) -> str:
        done = subprocess.run(
            [*command, "-c", str(configuration)], capture_output=True, text=True, timeout=START_SECONDS
        )
        if done.returncode:
            raise RuntimeError(f"{command[0]} failed: {done.stderr[-2000:]}")
        return done.stdout

    def keyring(name: str, *caps: str) -> None:
        pairs = [part for cap in caps for part in ("--cap", *cap.split(" ", 1))]
        run("ceph-authtool", str(root / "keyring"), "--gen-key", "-n", name, *pairs)

    try:
        run(
            "ceph-authtool",
            "--create-keyring",
            str(root / "keyring"),
            "--gen-key",
            "-n",
            "mon.",
            "--cap",
            "mon",
            "allow *",
        )
        keyring("client.admin", "mon allow *", "osd allow *", "mgr allow *")
        keyring("client.rgw", "mon allow *", "osd allow *")
        keyring("osd.0", "mon allow profile osd", "osd allow *")
        run(
            "monmaptool",
            "--create",
            "--fsid",
            fsid,
            "--addv",
            "a",
            f"[v2:127.0.0.1:{mon_port}]",
            str(root / "monmap"),
        )
        run(
            "ceph-mon",
            "--mkfs",
            "-i",
            "a",
            "--monmap",
            str(root / "monmap"),
            "--keyring",
            str(root / "keyring"),
        )
        _daemon(root, "ceph-mon", "-i", "a", "--foreground")
        run("ceph", "--name", "client.admin", "osd", "create")
        run("ceph-osd", "--mkfs", "-i", "0", "--no-mon-config")
        _daemon(root, "ceph-osd", "-i", "0", "--foreground")
        _wait(
            lambda: (
                json.loads(run("ceph", "--name", "client.admin", "osd", "stat", "-f", "json"))["num_up_osds"]
                == 1
            )
        )
        for name, (key, secret) in {"writer": keys[:2], "reader": keys[2:]}.items():
            admin = ("radosgw-admin", "--name", "client.rgw", "user", "create", "--uid", name)
            run(*admin, "--display-name", name, "--access-key", key, "--secret", secret)
        _daemon(root, "radosgw", "--name", "client.rgw", "--foreground")
        _wait(lambda: _answers(f"http://127.0.0.1:{rgw_port}"))
    except BaseException:
        stop(root)
        raise
    server = S3Server(f"http://127.0.0.1:{rgw_port}", *keys)
    (root / "server.json").write_text(json.dumps(asdict(server)))
    return server


def start_apart(root: Path) -> S3Server:
    """`start`, by a process that then ends: the server is no child of whoever needed it first."""
    subprocess.run([sys.executable, __file__, "--detach", str(root)], check=True, timeout=3 * START_SECONDS)
    return S3Server(**json.loads((root / "server.json").read_text()))


def stop(root: Path) -> None:
    """Stop the programs started in `root`, by their process ids, and remove the directory."""
    pids = [int(path.read_text()) for path in root.glob("*.started")]
    for sign in (signal.SIGTERM, signal.SIGKILL):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sign)
        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline and sum(map(_alive, pids)):  # each, to reap it
            time.sleep(0.02)
    shutil.rmtree(root, ignore_errors=True)


def make_bucket(server: S3Server, name: str) -> None:
    """Make a bucket, by a request signed as S3 wants it (AWS signature, version 4)."""
    signed_request(server, "PUT", f"/{name}")


def signed_request(
    server: S3Server, method: str, path: str, *, query: str = "", body: bytes = b""
) -> tuple[int, bytes]:
    """Send a request that obstore has no name for, such as making a bucket; returns status and body.

    Args:
        server: Where to.
        method: GET, PUT, ...
        path: `/bucket` or `/bucket/key`.
        query: `name=value`, or empty.
        body: What is sent.
    """
    now = datetime.now(UTC)
    stamp, date = now.strftime("%Y%m%dT%H%M%SZ"), now.strftime("%Y%m%d")
    host = server.endpoint.partition("://")[2]
    digest = hashlib.sha256(body).hexdigest()
    headers = {"host": host, "x-amz-content-sha256": digest, "x-amz-date": stamp}
    signed = ";".join(headers)
    lines = "".join(f"{name}:{value}\n" for name, value in headers.items())
    canonical = f"{method}\n{path}\n{query}\n{lines}\n{signed}\n{digest}"
    scope = f"{date}/us-east-1/s3/aws4_request"
    text = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
    key = f"AWS4{server.secret_key}".encode()
    for part in (date, "us-east-1", "s3", "aws4_request", text):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    who = f"Credential={server.access_key}/{scope}"
    headers["authorization"] = f"AWS4-HMAC-SHA256 {who}, SignedHeaders={signed}, Signature={key.hex()}"
    url = f"{server.endpoint}{path}" + (f"?{query}" if query else "")
    request = urllib.request.Request(url, data=body or None, headers=headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=20) as reply:
            return reply.status, reply.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def _daemon(root: Path, program: str, *arguments: str) -> None:
    # A session of its own: it outlives the test process that happened to be the first to need it.
    process = subprocess.Popen(
        [program, *arguments, "-c", str(root / "ceph.conf")],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    (root / f"{program}.started").write_text(str(process.pid))
    process.returncode = 0  # not waited for: `stop` ends it


def _wait(ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not ready():
        if time.monotonic() > deadline:
            raise RuntimeError("the server did not come up")
        time.sleep(0.05)


def _alive(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG) == (0, 0)
    except ChildProcessError:
        pass
    try:  # a zombie that nobody has reaped is not alive
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1):
            return True
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False


if __name__ == "__main__":
    directory = Path(sys.argv[-1])
    if sys.argv[1] == "--detach":
        start(directory)
        sys.exit()
    started = time.monotonic()
    print(start(directory), f"{time.monotonic() - started:.1f} s", flush=True)
    try:
        sys.stdin.read()
    finally:
        stop(directory)
