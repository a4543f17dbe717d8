"""Commands that look into versions: show and diff, and the text that is printed."""

from __future__ import annotations

import argparse
import contextlib
import shutil
from pathlib import Path

import numpy as np
import pytest
from cliruns import HOSTILE, Run, make_store, runner, state
from hypothesis import given
from hypothesis import strategies as st

import deltaformat as df
from deltaformat import batches
from deltaformat.cli import output, parser
from deltaformat.cli.compare import count_differences
from deltaformat.cli.options import UsageError, block_size, byte_size, hours, natural, positive
from deltaformat.cli.output import Column, escape, human, percent, plain, table
from deltaformat.dtypes import DTYPES


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.delenv("DELTAFORMAT_DEBUG", raising=False)
    return runner(capsys)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("cli") / "store")


@pytest.fixture
def store(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "store"))


def test_show_says_where_the_bytes_are(run: Run, store: Path) -> None:
    document = run("show", store, "--step", 2, "--json").json
    assert set(document) == {
        *("store", "step", "seq", "branch", "time", "parent", "root", "metadata", "nbytes", "stored_bytes"),
        *("manifest_bytes", "blocks", "pieces", "chain", "encodings", "packs", "files", "tensors"),
    }
    with df.open(store).version(2) as version:
        assert document["root"] == version.root
        assert [entry["name"] for entry in document["tensors"]] == version.keys()
        assert document["pieces"] == len(version.map.length)
    tensors = {entry["name"]: entry for entry in document["tensors"]}
    assert set(tensors["wide"]) == {"name", "dtype", "shape", "nbytes", "stored_bytes", "blocks", "chain"}
    assert tensors["wide"]["nbytes"] == 64 * 40 * 2
    assert tensors["wide"]["blocks"] == 20
    assert tensors["wide"]["chain"]["max"] > tensors["wide"]["chain"]["min"] == 1
    assert tensors["empty"] | {"chain": None} == {
        "name": "empty", "dtype": "F32", "shape": [0, 4],
        "nbytes": 0, "stored_bytes": 0, "blocks": 0, "chain": None,
    }  # fmt: skip
    assert sum(entry["stored_bytes"] for entry in document["encodings"]) == document["stored_bytes"]
    assert sum(entry["used_bytes"] for entry in document["packs"]) == document["stored_bytes"]
    assert sum(entry["pieces"] for entry in document["packs"]) <= document["pieces"]
    assert "sparse" in {entry["encoding"] for entry in document["encodings"]}
    assert document["files"] == [{"path": "config.json", "size": 2}]

    text = run("show", store).out
    assert escape(HOSTILE) in text
    assert "config.json" in text
    assert '"loss": 0.5' in text
    assert f"root      {document['root']}" in text


def test_show_finds_by_tag_and_seq(run: Run, store: Path) -> None:
    run("tag", store, "first", "--step", 0)
    assert run("show", store, "--tag", "first", "--json").json["step"] == 0
    assert run("show", store, "--seq", 2, "--json").json["step"] == 1
    assert run("show", store, "--json").json["step"] == 2
    assert run("show", store, "--seq", 0).code == 1
    assert run("show", store, "--seq", 1, "--tag", "first").code == 2


def test_show_of_a_version_without_tensors(run: Run, tmp_path: Path) -> None:
    with df.create(tmp_path / "s").writer() as writer:
        writer.commit(step=0, tensors={})
    assert run("show", tmp_path / "s").code == 0
    assert run("show", tmp_path / "s", "--json").json["chain"] == {"min": 0, "mean": 0.0, "max": 0}
    assert run("diff", tmp_path / "s", 0, 0).code == 0
    assert run("export", tmp_path / "s", "--step", 0, "--output", tmp_path / "out").code == 0
    assert run("verify", tmp_path / "s").code == 0


@pytest.mark.parametrize(("a", "b", "changed"), [(0, 1, 5), (1, 0, 5), (0, 2, 9), (1, 2, 4), (2, 2, 0)])
def test_diff_counts_bits(run: Run, store: Path, a: int, b: int, changed: int) -> None:
    """DF-DIG-02: also between versions that are no parent and child, by bytes."""
    document = run("diff", store, a, b, "--json").json
    assert set(document) == {"store", "branch", "a", "b", "summary", "tensors"}
    assert document["summary"] == {
        "elements": 64 * 40 + 7,
        "changed": changed,
        "density": changed / (64 * 40 + 7),
        "tensors": 4,
        "same": 3 if changed else 4,
        "changed_tensors": 1 if changed else 0,
        "replaced": 0,
        "added": 0,
        "removed": 0,
    }
    wide = document["tensors"][-1]
    assert wide == {
        "name": "wide", "status": "changed" if changed else "same", "dtype": "BF16", "elements": 2560,
        "nbytes": 5120, "changed": changed, "density": changed / 2560,
    }  # fmt: skip
    text = run("diff", store, a, b).out
    assert f"{changed} of 2,567 weights differ" in text
    assert ("wide" in text) == bool(changed)


def test_diff_of_other_sets_and_bits(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nan = np.array([np.nan, 0.0, 1.0], np.float32)
    minus = nan * np.array([1, -1, 1], np.float32)
    long = np.zeros((100, 10), np.float32)
    longer = long.copy()
    longer[99, 9] = 1
    first = {"gone": nan, "nan": nan, "shape": nan, "long": long}
    second = {"new": nan, "nan": minus, "shape": nan.reshape(1, 3), "long": longer}
    with df.create(tmp_path / "s", block_bytes=256).writer() as writer:
        writer.commit(step=0, tensors=first)
        writer.commit(step=1, tensors=second, allow_set_change=True)
        writer.commit(step=2, tensors=second, metadata={"nothing": "new"})
    monkeypatch.setattr(batches, "BATCH_BYTES", 400)
    for b in (1, 2):
        document = run("diff", tmp_path / "s", 0, b, "--json").json
        assert {entry["name"]: (entry["status"], entry["changed"]) for entry in document["tensors"]} == {
            "gone": ("removed", 3),
            "long": ("changed", 1),
            "nan": ("changed", 1),
            "new": ("added", 3),
            "shape": ("replaced", 3),
        }
    assert "; 1 replaced; 1 added; 1 removed" in run("diff", tmp_path / "s", 0, 1).out


def test_diff_across_a_fork_skips_shared_pieces(
    run: Run, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    df.open(store).fork("side", step=1)
    with df.open(store).writer("side") as writer:
        writer.commit(step=7, tensors=state(1, 6))
    read: list[str] = []
    read_many = batches.read_many
    monkeypatch.setattr(
        batches, "read_many", lambda version, names: read.extend(names) or read_many(version, names)
    )
    assert run("diff", store, 0, 7, "--branch", "side", "--json").json["summary"]["changed"] == 6
    assert set(read) == {"wide"}


@given(data=st.data(), name=st.sampled_from(sorted(DTYPES)))
def test_differences_are_counted_per_element(data: st.DataObject, name: str) -> None:
    """For dtypes of any width: as many as a walk over the bits of each element finds."""
    bits = DTYPES[name].bits
    count = 8 * data.draw(st.integers(1, 6))
    first = np.frombuffer(
        data.draw(st.binary(min_size=count * bits // 8, max_size=count * bits // 8)), np.uint8
    )
    second = first.copy()
    for place in data.draw(st.lists(st.integers(0, first.size * 8 - 1), max_size=9)):
        second[place // 8] ^= 1 << place % 8
    one, other = (int.from_bytes(side.tobytes(), "little") for side in (first, second))
    expected = sum(((one ^ other) >> index * bits) & ((1 << bits) - 1) != 0 for index in range(count))
    assert count_differences(first, second, bits) == expected


@given(st.text())
def test_escaped_names_are_printable_and_short(name: str) -> None:
    shown = escape(name)
    assert shown
    assert shown.isprintable()
    assert len(shown) <= output.MAX_NAME
    assert plain(name).isprintable()


def test_escape_tells_names_apart() -> None:
    assert escape("layer.0/weight") == "layer.0/weight"
    assert escape("a\nb") == "a\\nb"
    assert escape("a\\nb") == "a\\\\nb"
    assert escape("\u202e") == "\\u202e"
    assert escape("") == '""'
    assert escape("x" * 4000).count("x") == 96


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (9_994, "9.99 kB"), (12_345, "12.3 kB"),
        (999_499, "999 kB"),
        (999_600, "1.00 MB"), (5_000_000_000, "5.00 GB"), (2**53 - 1, "9.01 PB"), (10**21, "1000 EB"),
    ],
)  # fmt: skip
def test_human_sizes(nbytes: int, text: str) -> None:
    assert human(nbytes) == text


def test_percentages() -> None:
    assert [percent(1, 0), percent(0, 9), percent(1, 10**9), percent(1, 200), percent(9, 10)] == [
        *("-", "0.000 %", "<0.001 %", "0.500 %", "90.0 %")
    ]


def test_tables_are_aligned() -> None:
    assert table([Column("name", left=True), Column("size")], [["a", "10"], ["long name", "9"]]) == [
        "name       size",
        "a            10",
        "long name     9",
    ]


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("5GB", 5 * 10**9), ("1.5k", 1500), ("64MiB", 64 << 20), ("2 kib", 2048), ("1t", 10**12)],
)
def test_sizes(text: str, size: int) -> None:
    assert byte_size(text) == size


@given(st.text(max_size=12))
def test_arguments_are_numbers_or_refused(text: str) -> None:
    for kind in (natural, positive, byte_size, block_size, hours):
        with contextlib.suppress(argparse.ArgumentTypeError):
            assert kind(text) >= 0


def test_usage_errors_name_the_help() -> None:
    with pytest.raises(UsageError, match="deltaformat gc --help"):
        parser.parse(["gc"])
