"""Hypothesis profiles, `ci`: small and always the same, `nightly`: explores; and the engines of the codec."""

import os

# The kernels read it when they are imported: here they run in Triton's interpreter, on the CPU.
os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
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
