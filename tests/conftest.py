"""Hypothesis profiles: `ci`, small and the same in every run, and `nightly`, which explores."""

import os

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
