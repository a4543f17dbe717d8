"""Hypothesis profiles, `ci`: small, always the same, `nightly`: explores; the codec's engines; servers."""

import json
import os
import shutil
import tempfile
from pathlib import Path

# The kernels read it when they are imported: here they run in Triton's interpreter, on the CPU.
os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import radosgw
from engines import LEVELS, served_by
from hypothesis import HealthCheck, settings

# Machines that run tests are often shared: an example's time says nothing about the code.
settings.register_profile(
    "ci",
    max_examples=30,
    stateful_step_count=20,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "nightly",
    max_examples=1000,
    stateful_step_count=80,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(scope="module", params=["numpy", *LEVELS[:1]])
def engine(request):
    """Run a module's tests once with NumPy and once with the kernels, where there are any."""
    with served_by(request.param):
        yield request.param


pytest.register_assert_rewrite("deltaformat.testing")

# -- servers that the workers of a run share: who needs one first starts it, the run's end stops it ---------

SHARED = "DELTAFORMAT_TEST_SERVERS"


def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        os.environ[SHARED] = tempfile.mkdtemp(prefix="dft-")  # short: sockets lie in it


def pytest_unconfigure(config):
    if not hasattr(config, "workerinput"):
        shared = Path(os.environ.pop(SHARED))
        if (shared / "rgw").exists():
            radosgw.stop(shared / "rgw")
        shutil.rmtree(shared, ignore_errors=True)


@pytest.fixture(scope="session")
def s3_server():
    """A real S3 server, and a bucket `tests`; see radosgw.py."""
    import fcntl

    reason = radosgw.why_not()
    if reason is not None:
        if os.environ.get("CI") == "true":
            pytest.fail(f"CI must test a real S3 server: {reason}")
        pytest.skip(reason)
    shared = Path(os.environ[SHARED])
    with (shared / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        known = shared / "rgw" / "server.json"
        if known.exists():
            return radosgw.S3Server(**json.loads(known.read_text()))
        server = radosgw.start_apart(shared / "rgw")
        radosgw.make_bucket(server, "tests")
        return server
