"""The worked store of SPEC.md, appendix A, against what builds it, and against the library."""

from __future__ import annotations

import json

import numpy as np

import deltaformat as df
import worked_store
from deltaformat.encodings import decode_piece
from deltaformat.errors import DeltaFormatError
from deltaformat.manifest import decode_part
from deltaformat.versionmap import VersionMap

SPEC = worked_store.SPEC.read_text()
CASE = worked_store.ROOT / "conformance" / "cases" / "valid" / "worked-store"


def shown_manifest(version: VersionMap, parent: int | None) -> tuple[bytes, int]:
    """The manifest in SPEC.md that says what `version` does: neither Arrow nor zstd is canonical, so bytes
    may differ."""
    commits = [json.loads(data) for key, data in worked_store.parse(SPEC).items() if key.startswith("log/")]
    for manifest in (entry for commit in commits for entry in commit.get("manifests", ())):
        frame = worked_store.parse(SPEC)[manifest["key"]]
        try:
            shown = decode_part(
                frame,
                content_size=manifest["content_size"],
                where="SPEC.md",
                digest="xxh3-128",
                block_bytes=worked_store.BLOCK_BYTES,
                parent=parent,
            )
        except DeltaFormatError:
            continue  # of the other step: it names another parent
        columns = ("digest", "fresh", "depth", "pack", "offset", "length", "encoding")
        assert (shown.names, shown.dtypes, shown.shapes) == (version.names, version.dtypes, version.shapes)
        assert (shown.packs, shown.files) == (version.packs, version.files)
        for column in columns:
            assert np.array_equal(getattr(shown, column), getattr(version, column)), column
        return frame, manifest["content_size"]
    raise AssertionError("SPEC.md shows no manifest of this step")


def test_spec_shows_the_worked_store() -> None:
    """Appendix A, regenerated: every object, byte for byte (manifests by meaning)."""
    assert worked_store.parse(SPEC) == worked_store.build(shown_manifest)


def test_the_committed_case_is_the_store_of_spec() -> None:
    store = CASE / "store"
    committed = {
        str(path.relative_to(store)): path.read_bytes() for path in store.rglob("*") if path.is_file()
    }
    assert committed == worked_store.parse(SPEC)


def test_both_steps_by_hand() -> None:
    """The payload of SPEC.md's table gives step 1 from step 0; both steps read, with the roots of SPEC 7.1
    computed by hand."""
    block = np.frombuffer(worked_store.W0, np.uint8).copy()
    decode_piece(3, worked_store.PAYLOAD, block)
    assert block.tobytes() == worked_store.W1
    store = df.open(CASE / "store")
    for step, tensors in enumerate(worked_store.STEPS):
        with store.version(step=step) as version:
            assert version.root == worked_store.root(step)
            for name, (dtype, shape, content) in tensors.items():
                found = version.get_bytes(name)
                assert (found.dtype, tuple(found.shape), bytes(found.data)) == (dtype, shape, content)
            assert version.read_file("config.json") == worked_store.CONFIG
    assert store.verify(all=True).findings == []
