"""The script that checks a GPU runs here on a few kilobytes, so that it works once there is one."""

import json

import pytest

import gpu_check


def run(tmp_path, *arguments):
    path = tmp_path / "result.json"
    status = gpu_check.main(["--small", "--device", "cpu", "--json", str(path), *arguments])
    return status, json.loads(path.read_text())


def test_with_torch(tmp_path, capsys):
    status, result = run(tmp_path)
    assert status == 0
    assert result["facts"]["engine"] == "torch"
    results = {check["check"]: check["result"] for check in result["checks"]}
    assert results.pop("beyond 2^31 elements, torch") == "skipped"
    assert set(results.values()) == {"passed"}
    assert len(results) >= 10
    measured = {rate["what"] for rate in result["rates"]}
    assert set(gpu_check.EXPECTED) | {"commit, kept on device", "commit, kept on host"} < measured
    commits = [rate for rate in result["rates"] if rate["what"].startswith("commit")]
    assert all("down changes" in rate for rate in commits)  # they went the device's way
    printed = capsys.readouterr().out
    assert "of the read ceiling" in printed
    assert "0 of 11 checks failed" in printed


@pytest.mark.slow
def test_with_triton(tmp_path, monkeypatch):
    """Its path through the kernels, in the interpreter; of the digests only the cheap ones."""
    pytest.importorskip("triton")
    monkeypatch.setattr(gpu_check, "LENGTHS", [1, 241, 1025])
    check_hash = gpu_check.check_hash
    monkeypatch.setattr(
        gpu_check, "check_hash",
        lambda *given: "takes the interpreter too long" if given[1] == "blake3-256" else check_hash(*given),
    )  # fmt: skip
    monkeypatch.setattr(gpu_check, "measure", lambda *_: None)
    status, result = run(tmp_path, "--engine", "triton")
    assert status == 0
    assert {check["result"] for check in result["checks"]} == {"passed", "skipped"}


def test_a_wrong_digest_is_a_failure(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_check, "measure", lambda *_: None)
    monkeypatch.setattr(gpu_check, "LENGTHS", [1])
    hash_blocks = gpu_check.hash_blocks
    monkeypatch.setattr(gpu_check, "hash_blocks", lambda *given, **named: hash_blocks(*given, **named) ^ 1)
    status, result = run(tmp_path)
    assert status == 1
    failed = [check["check"] for check in result["checks"] if check["result"] == "failed"]
    assert len(failed) == 4
    assert f"4 of {len(result['checks'])} checks failed" in capsys.readouterr().out


def test_what_breaks_does_not_hide_the_rest(tmp_path, monkeypatch, capsys):
    def broken(*_):
        raise RuntimeError("broken")

    monkeypatch.setattr(gpu_check, "measure", broken)
    monkeypatch.setattr(gpu_check, "check_diff", broken)
    monkeypatch.setattr(gpu_check, "LENGTHS", [1])
    status, result = run(tmp_path)
    assert status == 1
    assert sum(check["result"] == "passed" for check in result["checks"]) == 6
    assert "RuntimeError: broken" in capsys.readouterr().err


def test_time_runs_out(tmp_path, monkeypatch):
    status, result = run(tmp_path, "--limit", "-1")
    assert status == 0
    assert {check["result"] for check in result["checks"]} == {"skipped"}
    assert result["rates"] == []


def test_without_a_gpu(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert gpu_check.main([]) == 2
    assert "--small" in capsys.readouterr().err
