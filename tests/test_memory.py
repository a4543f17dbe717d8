"""How much memory a writer and a reader take, measured from outside: each run is a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import deltaformat

MB = 10**6
STATE = 300 * MB
TILE = 40 * MB  # what the run itself takes to make its tensors: two arrays of 20 MB


def run(name, directory):
    paths = [str(Path(deltaformat.__file__).parent.parent)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    script = str(Path(__file__).with_name("memoryruns.py"))
    done = subprocess.run(
        [sys.executable, script, name, str(directory)], env=environment, stdout=subprocess.PIPE, check=True
    )
    return json.loads(done.stdout)


@pytest.mark.slow
def test_a_writer_holds_one_copy(tmp_path):
    """DF-WR-01, DF-LIM-02: one host copy of the state and at most 256 MB; tensors are taken one at a time
    from a stream.
    """
    peaks = run("streamed", tmp_path / "store")["peaks"]
    assert max(peaks) < STATE + TILE + 256 * MB, peaks


@pytest.mark.slow
def test_a_writer_that_rebases_holds_one_copy(tmp_path):
    """DF-WR-02: replacing full chains keeps to the same bound."""
    peaks = run("rebased", tmp_path / "store")["peaks"]
    assert max(peaks) < 160 * MB + TILE + 256 * MB, peaks


@pytest.mark.slow
def test_a_commit_in_flight_holds_another_copy(tmp_path):
    """`block=False` takes one more copy, and gives it back."""
    peaks = run("mapping_in_background", tmp_path / "store")["peaks"]
    assert max(peaks) < 2 * STATE + 256 * MB, peaks


@pytest.mark.slow
def test_a_reader_keeps_to_its_budget(tmp_path):
    """DF-SEC-01, DF-LIM-02: the result and the budget, which is 64 MiB here."""
    run("reading", tmp_path / "store")
    (peak,) = run("reading_measured", tmp_path / "store")["peaks"]
    assert peak < STATE + 64 * MB + 64 * MB, peak


@pytest.mark.slow
def test_memory_does_not_grow(tmp_path):
    """Fifty commits: after the fifth a writer grows no more."""
    found = run("many", tmp_path / "store")
    assert found["growth"] < 16 * MB
    assert found["late"] < 6 * MB


@pytest.mark.slow
def test_hashing_takes_what_it_says(tmp_path):
    """`hash_blocks` states 320 MiB for torch, also for tensors that are shorter than a block."""
    peaks = run("hashing", tmp_path)["peaks"]
    assert max(peaks) < 336 << 20, peaks
