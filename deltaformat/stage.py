"""Turn tensors into blocks, pieces and packs: a version's content, before it is committed (SPEC 14, step 2).

Per tensor, in slabs of blocks that bound memory: look (compare with what is held, or hash), read (what is
neither held nor unchanged), encode, place. Nothing here is visible to readers; a stage that fails leaves
packs that no record names.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from deltaformat.baseline import Baseline
from deltaformat.blocks import Buffer, Bytes, block_lengths, byte_view
from deltaformat.digests import DigestAlgorithm
from deltaformat.encodings import Encoding, compare_and_encode, encode_block
from deltaformat.encodings.strata import Positions
from deltaformat.encodings.streams import fitting_width
from deltaformat.errors import CorruptError, ErrorCode, InconsistentError
from deltaformat.gpu.survey import DeviceTensor
from deltaformat.looks import Look, StagedTensor, open_tensor, want
from deltaformat.pieces import NO_PIECES, OFFSET, PACK, SLOT, Pieces, StagedRow, build_map, pieces_of
from deltaformat.policy import Policy, StageCounts
from deltaformat.rebase import rebase_due, replace_prefix
from deltaformat.rebuild import Rebuilder, Rebuilt
from deltaformat.sink import PackSink
from deltaformat.tensors import HostTensor
from deltaformat.twins import Twins
from deltaformat.versionmap import NOT_FRESH, VersionMap
from deltaformat.workers import Workers

__all__ = ["Stage"]

SLAB_BYTES = 8 << 20


class Stage:
    """Collects one version's tensors.

    Args:
        parent: The parent version's map, or None.
        baseline: What the writer holds; its blocks are replaced as they are staged.
        sink: Takes the pieces.
        rebuilder: Reads the parent's blocks where they are not held.
        algorithm: The store's digest.
        block_bytes: The store's block size.
        depth: The version's depth in its lineage; staggers re-bases.
        policy: How to store.
        progress: Called with the canonical bytes done since the last call.
    """

    def __init__(
        self,
        *,
        parent: VersionMap | None,
        baseline: Baseline,
        sink: PackSink,
        rebuilder: Rebuilder,
        algorithm: DigestAlgorithm,
        block_bytes: int,
        depth: int,
        policy: Policy,
        progress: Callable[[int], None],
    ) -> None:
        self._parent = parent
        self._baseline = baseline
        self._sink = sink
        self._rebuilder = rebuilder
        self._digest = algorithm
        self._block_bytes = block_bytes
        self._depth = depth
        self._policy = policy
        self._progress = progress
        self._first_new_pack = len(parent.packs) if parent is not None else 0
        self._twins = Twins(parent, baseline, rebuilder)
        self._staged: dict[str, StagedRow | StagedTensor | None] = {}  # None: the parent's row, unchanged
        self._workers = Workers(policy.threads, name="deltaformat-encode")
        self.counts = StageCounts()

    def add(self, name: str, source: HostTensor | DeviceTensor) -> None:
        """Stage one tensor.

        Raises:
            InconsistentError: the name was staged before (parts-disagree).
            StoreError, CorruptError, MissingError: the parent's content could not be read, or a pack not be
                written.
        """
        if name in self._staged:
            raise InconsistentError(
                ErrorCode.PARTS_DISAGREE, "tensor given twice; give each name once", where=name
            )
        parent, baseline, size = self._parent, self._baseline, self._block_bytes
        if isinstance(source, DeviceTensor):
            source.survey.run(
                lambda member, digests: want(
                    member, digests, parent=parent, baseline=baseline, block_bytes=size
                )
            )
        tensor = open_tensor(name, source, parent=parent, baseline=baseline, block_bytes=size)
        self._staged[name] = tensor
        slab = max(1, SLAB_BYTES // self._block_bytes)
        for start in range(0, len(tensor.lengths), slab):
            self._stage_slab(tensor, range(start, min(start + slab, len(tensor.lengths))))
        self._place_raw(tensor)
        self.counts.tensors += 1
        self.counts.blocks += len(tensor.lengths)
        self.counts.nbytes += source.nbytes
        self._staged[name] = None if self._is_parents(tensor) else self._row(tensor)

    def finish(self) -> VersionMap:
        """Wait until all packs are durable and give the version's map.

        Raises:
            StoreError: an upload failed.
        """
        self._workers.close()
        self.counts.read_bytes += self._twins.read_bytes
        refs, offsets = self._sink.close()
        rows = {name: row for name, row in self._staged.items() if not isinstance(row, StagedTensor)}
        return build_map(self._parent, rows, refs, offsets, digest_bytes=self._digest.size)

    def abort(self) -> None:
        """Give up: uploads that have not begun are dropped, and no thread is left."""
        self._workers.close()
        self._sink.abort()

    # -- per tensor ------------------------------------------------------------------------------------------

    def _is_parents(self, tensor: StagedTensor) -> bool:
        """Whether the tensor's row of the map is the parent's."""
        if self._parent is None or tensor.name not in self._parent.index or any(tensor.fresh):
            return False
        row = self._parent.index[tensor.name]
        described = tensor.source.dtype, tensor.source.shape
        return described == (self._parent.dtypes[row], self._parent.shapes[row])

    def _row(self, tensor: StagedTensor) -> StagedRow:
        return StagedRow.of_chains(
            tensor.name,
            tensor.source.dtype,
            tensor.source.shape,
            digests=tensor.held.digests.copy(),
            fresh=tensor.fresh,
            chains=[self._chain(tensor, index) for index in range(len(tensor.lengths))],
        )

    def _stage_slab(self, tensor: StagedTensor, slab: range) -> None:
        started = time.perf_counter()
        if isinstance(tensor.source, DeviceTensor):
            tensor.source.prepare(slab)
        looks = self._workers.map(lambda index: self._look(tensor, index), slab)
        unread = [look for look in looks if look.digest is not None and look.own is None]
        self._read(tensor, unread, self._encode_read)
        self._rebase(tensor, [look for look in looks if look.rebase])
        self._workers.map(lambda look: self._hold(tensor, look), [look for look in looks if look.own])
        for look in looks:
            if look.digest is None:
                self._place_unchanged(tensor, look.index)
            else:
                self._place_changed(tensor, look, look.digest)
        self.counts.encode_seconds += time.perf_counter() - started
        self._progress(int(tensor.lengths[slab.start : slab.stop].sum()))

    def _read(
        self, tensor: StagedTensor, looks: Sequence[Look], use: Callable[[StagedTensor, Look, Rebuilt], None]
    ) -> None:
        """Read the parent's blocks, whole chains, for what `use` does with them."""
        if looks and self._parent is not None:
            ids = np.array([tensor.parent_start + look.index for look in looks], np.int64)
            rebuilt = list(self._rebuilder.blocks(self._parent, ids))
            self.counts.read_bytes += sum(block.data.size for block in rebuilt)
            self._workers.map(lambda pair: use(tensor, *pair), list(zip(looks, rebuilt, strict=True)))

    def _rebase(self, tensor: StagedTensor, looks: Sequence[Look]) -> None:
        """Encode new prefixes for chains of blocks that are held.

        The first pieces are enough where the digests of their content are known; otherwise whole chains vouch
        for it.
        """
        if not looks or self._parent is None or tensor.old is None:
            return
        old, at = tensor.old, {tensor.parent_start + look.index: look for look in looks}
        digests = {block: old.keyframe(look.index) for block, look in at.items()}
        known = {block: digest for block, digest in digests.items() if digest is not None}

        def use(read: tuple[int, Bytes]) -> None:
            block, keyframe = read
            self._squash(tensor, at[block], old.block(at[block].index), keyframe)

        try:
            read = list(self._rebuilder.keyframes(self._parent, known))
        except CorruptError:
            read = []  # what is known may be of a commit that failed: the whole chain tells
        self.counts.read_bytes += sum(keyframe.size for _, keyframe in read)
        self._workers.map(use, read)
        self._read(tensor, [look for look in looks if look.rebase], self._squash_read)

    # -- per block: look and encode (in threads), then place (in order) --------------------------------------

    def _look(self, tensor: StagedTensor, index: int) -> Look:
        if isinstance(tensor.source, DeviceTensor):
            return self._look_received(tensor, tensor.source, index)
        new = tensor.block(index)
        if self._parent is None or index >= tensor.comparable:
            return Look(index, self._digest(new), self._encode_first(tensor, new))
        expected = self._parent.digest[tensor.parent_start + index]
        if tensor.old is not None and tensor.old.matches(index, expected, new.size):
            base = tensor.old.block(index)
            width = fitting_width(new.size, tensor.dtype.width)
            positions, own = compare_and_encode(new, base, tensor.dtype, strata=self._policy.strata)
            if own is None:
                return Look(index)
            rebase = self._rebase_due(tensor, index, own)
            return Look(index, self._digest(new), own, (width, positions), rebase=rebase)
        digest = self._digest(new)
        return Look(index, None if digest == expected.tobytes() else digest)

    def _look_received(self, tensor: StagedTensor, source: DeviceTensor, index: int) -> Look:
        """What `_look` does, of a block that a device has hashed and compared."""
        digest, expected, base = source.digest(index), None, None
        if self._parent is not None and index < tensor.comparable:
            expected = self._parent.digest[tensor.parent_start + index]
            if tensor.old is not None and tensor.old.matches(index, expected, int(tensor.lengths[index])):
                base = tensor.old.block(index)
        changed = source.receive(index, base, self._digest)
        if expected is None:
            return Look(index, digest, self._encode_first(tensor, tensor.block(index)))
        if digest == expected.tobytes():
            return Look(index)
        if base is None:
            return Look(index, digest)
        own = self._encode(tensor, tensor.block(index), base, changed[1] if changed is not None else None)
        return Look(index, digest, own, changed, rebase=self._rebase_due(tensor, index, own))

    def _encode_read(self, tensor: StagedTensor, look: Look, parent: Rebuilt) -> None:
        look.own = self._encode(tensor, tensor.block(look.index), parent.data, None)
        look.rebase = self._rebase_due(tensor, look.index, look.own)
        if look.rebase:
            self._squash_read(tensor, look, parent)

    def _squash_read(self, tensor: StagedTensor, look: Look, parent: Rebuilt) -> None:
        # The keyframe was verified with its whole chain: a flipped bit in it would have shown in the parent's
        # digest.
        tensor.held.know_keyframe(look.index, self._digest(parent.keyframe))
        self._squash(tensor, look, parent.data, parent.keyframe)

    def _squash(self, tensor: StagedTensor, look: Look, parent: Bytes, keyframe: Bytes) -> None:
        assert look.own is not None
        made = replace_prefix(
            tensor.block(look.index),
            parent,
            keyframe,
            tensor.dtype,
            own=_size(look.own[1]),
            max_chain=self._policy.max_chain,
            encode=lambda new, base: self._encode(tensor, new, base, None),
        )
        look.rebase, look.prefix, look.own = False, made.prefix, made.alone or look.own

    def _encode(
        self, tensor: StagedTensor, new: Bytes, base: Bytes, positions: Positions | None
    ) -> tuple[Encoding, bytes]:
        return encode_block(new, base, tensor.dtype, positions=positions, strata=self._policy.strata)

    def _encode_first(self, tensor: StagedTensor, new: Bytes) -> tuple[Encoding, Buffer]:
        return (
            (Encoding.RAW, new) if self._policy.keyframe == "raw" else encode_block(new, None, tensor.dtype)
        )

    def _rebase_due(self, tensor: StagedTensor, index: int, own: tuple[Encoding, Buffer]) -> bool:
        assert self._parent is not None
        block = tensor.parent_start + index
        chain = slice(self._parent.piece_start[block], self._parent.piece_start[block + 1])
        return own[0].needs_base and rebase_due(
            self._parent.length[chain],
            _size(own[1]),
            block=int(tensor.lengths[index]),
            turn=block + self._depth,
            max_chain=self._policy.max_chain,
        )

    def _hold(self, tensor: StagedTensor, look: Look) -> None:
        """Hold the new content, unless a twin of it is looked for among all that is held of the parent."""
        assert look.digest is not None
        assert look.own is not None
        new = tensor.block(look.index)
        if self._parent is None or 4 * _size(look.own[1]) <= new.size:
            patched = look.changed if tensor.held is tensor.old else None  # another size, another place
            tensor.held.replace(look.index, new, look.digest, changed=patched)
            look.held = True

    def _place_unchanged(self, tensor: StagedTensor, index: int) -> None:
        assert self._parent is not None
        block = tensor.parent_start + index
        digest = self._parent.digest[block]
        if not tensor.held.matches(index, digest, int(tensor.lengths[index])):
            tensor.held.replace(index, tensor.block(index), digest.tobytes())
            tensor.held.know_keyframe(index, None)
        tensor.chains.append(None)
        tensor.fresh.append(0)

    def _place_changed(self, tensor: StagedTensor, look: Look, digest: bytes) -> None:
        assert look.own is not None
        new, index = tensor.block(look.index), look.index
        encoding, payload = look.own
        before = self._parent_chain(tensor.parent_start + index) if index < tensor.comparable else NO_PIECES
        twin = self._twin(digest, new, before)
        if twin is None and 4 * _size(payload) > new.size:
            twin = self._twins.in_parent(digest, new)
        if not look.held:
            tensor.held.replace(index, new, digest)
        if twin is not None:
            tensor.held.know_keyframe(index, None)
        elif not encoding.needs_base:
            tensor.held.know_keyframe(index, digest)
        elif look.prefix is not None and not look.prefix[0].needs_base:
            assert self._parent is not None
            tensor.held.know_keyframe(index, self._parent.digest[tensor.parent_start + index].tobytes())
        if twin is not None:
            chain, fresh = twin
        elif encoding is Encoding.RAW and self._sink.fits_whole(tensor.source.nbytes):
            tensor.raw.append(index)
            chain, fresh = (
                np.array([[0, 0, new.size, encoding, -1]], np.int64),
                NOT_FRESH,
            )  # _place_raw fills it in
        else:
            own = self._piece(encoding, tensor.held.block(index) if encoding is Encoding.RAW else payload)
            if encoding.needs_base:
                chain, fresh = np.concatenate([self._prefix(look, before), own]), 1
            else:
                chain, fresh = own, NOT_FRESH
        self._twins.remember(digest, tensor.name, index)
        self.counts.changed_blocks += 1
        tensor.chains.append(chain)
        tensor.fresh.append(fresh)

    def _twin(self, digest: bytes, new: Bytes, before: Pieces) -> tuple[Pieces, int] | None:
        """The chain and `fresh` that a block shares with one staged before that has the same content.

        `fresh` carries over only if both came from the same chain, that is, from the same parent content
        (DF-MAN-07).
        """
        found = self._twins.staged(digest, new)
        if found is None:
            return None
        name, index = found
        staged = self._staged[name]
        assert staged is not None  # only changed blocks are remembered
        if isinstance(staged, StagedRow):
            chain, fresh = staged.chain(index), int(staged.fresh[index])
        else:
            chain, fresh = self._chain(staged, index), staged.fresh[index]
        same = self._before(name, index, new.size)
        return chain, fresh if np.array_equal(before, same) else NOT_FRESH

    def _before(self, name: str, index: int, length: int) -> Pieces:
        """The chain that a block has in the parent, if it has a counterpart of its length there."""
        row = self._parent.index.get(name) if self._parent is not None else None
        if self._parent is None or row is None:
            return NO_PIECES
        lengths = block_lengths(self._parent.nbytes(row), self._block_bytes)
        if index >= len(lengths) or lengths[index] != length:
            return NO_PIECES
        return self._parent_chain(int(self._parent.block_start[row]) + index)

    def _chain(self, tensor: StagedTensor, index: int) -> Pieces:
        chain = tensor.chains[index]
        return self._parent_chain(tensor.parent_start + index) if chain is None else chain

    def _prefix(self, look: Look, before: Pieces) -> Pieces:
        if look.prefix is None:
            return before
        encoding, payload = look.prefix
        piece = self._piece(encoding, payload, kind="rebase")
        return np.concatenate([before[:1], piece]) if encoding.needs_base else piece

    def _place_raw(self, tensor: StagedTensor) -> None:
        whole = len(tensor.raw) == len(tensor.lengths)
        if whole and tensor.raw:
            place = self._sink.add_tensor(
                tensor.name, tensor.source.dtype, tensor.source.shape, tensor.held.data
            )
            self.counts.payload_bytes += tensor.held.data.size
        for index in tensor.raw:
            chain = self._chain(tensor, index)
            if whole:
                chain[0, [PACK, OFFSET, SLOT]] = (
                    self._first_new_pack + place.pack,
                    index * self._block_bytes,
                    place.slot,
                )
            else:
                chain[:] = self._piece(Encoding.RAW, tensor.held.block(index))

    def _piece(self, encoding: Encoding, payload: Buffer, *, kind: str = "step") -> Pieces:
        place = self._sink.add(payload, kind=kind)
        size = _size(payload)
        if kind == "step":
            self.counts.payload_bytes += size
        else:
            self.counts.rebase_bytes += size
        return np.array([[self._first_new_pack + place.pack, 0, size, encoding, place.slot]], np.int64)

    def _parent_chain(self, block: int) -> Pieces:
        assert self._parent is not None
        return pieces_of(self._parent, block)


def _size(payload: Buffer) -> int:
    return byte_view(payload).nbytes
