"""Azure's storage emulator on loopback, where `azurite-blob` is installed (`npm install -g azurite`)."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime

from radosgw import free_port

PROGRAM = "azurite-blob"
ACCOUNT = "devstoreaccount1"
# The emulator's own key, which is the same everywhere and no secret.
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


def why_not() -> str | None:
    """Why the emulator cannot run here; None if it can."""
    return None if shutil.which(PROGRAM) else f"{PROGRAM} is not installed (npm install -g azurite)"


@contextlib.contextmanager
def running(container: str) -> Iterator[dict[str, str]]:
    """The emulator with a container; gives `storage_options` for `az://` URLs."""
    port = free_port()
    flags = ("--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry", "--silent")
    command = [PROGRAM, *flags, "--blobHost", "127.0.0.1", "--blobPort", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        endpoint = f"http://127.0.0.1:{port}/{ACCOUNT}"
        make_container(endpoint, container)
        yield {"account_name": ACCOUNT, "account_key": KEY, "endpoint": endpoint}
    finally:
        process.kill()
        process.wait()


def make_container(endpoint: str, name: str) -> None:
    """Make a container, by a request signed with the account's key."""
    now = datetime.now(UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
    headers = {"x-ms-date": now, "x-ms-version": "2021-08-06"}
    lines = "".join(f"{key}:{value}\n" for key, value in headers.items())
    text = "PUT" + "\n" * 12 + f"{lines}/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
    signature = hmac.new(base64.b64decode(KEY), text.encode(), hashlib.sha256).digest()
    headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(signature).decode()}"
    request = urllib.request.Request(f"{endpoint}/{name}?restype=container", method="PUT", headers=headers)
    urllib.request.urlopen(request, timeout=20).close()
