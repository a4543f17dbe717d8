"""How a writer stores blocks, and what it reports of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NoReturn

from deltaformat.errors import ErrorCode, MalformedError
from deltaformat.gpu.engines import DeviceChoice, check_device_choice
from deltaformat.versionmap import MAX_DEPTH

__all__ = ["Policy", "StageCounts"]


@dataclass(frozen=True, slots=True)
class Policy:
    """How a writer stores blocks. It decides sizes and speeds, never what is read back.

    The default stores steps small, and first versions ready to use. `smallest` is for slow links and for what
    is kept long, `lightest` for links so fast that decoding is what readers wait for.

    Attributes:
        max_chain: Pieces in a chain before its prefix is replaced, 2 to 64 (DF-WR-02).
        keyframe: How content that has no counterpart in the parent is stored: `raw` (packs are ordinary
            checkpoint files, least work to read and write) or `planes` (0.67 of that for bf16).
        strata: Code positions per magnitude class (SPEC 9.3): smaller, and without the native kernels slower;
            None does so where the kernels serve (`deltaformat doctor` says).
        pack_bytes: Size at which a pack is closed, in bytes.
        threads: Blocks encoded at a time.
        device: What hashes and compares torch tensors where they are, so that only changes cross to the host:
            `auto` on devices by the engine that serves there, and nothing on the CPU; `torch` or `triton` by
            that engine, also on the CPU; `off` copies all weights to the host. The same bytes are stored.
        device_baseline: Whether the version before is kept on the device, too. That takes as much of its
            memory as the weights; otherwise blocks that changed cross to the device to be compared there.
    """

    max_chain: int = 16
    keyframe: Literal["raw", "planes"] = "raw"
    strata: bool | None = None
    pack_bytes: int = 64 << 20
    threads: int = 2
    device: DeviceChoice = "auto"
    device_baseline: bool = False

    @classmethod
    def smallest(cls, *, pack_bytes: int = 64 << 20, threads: int = 2) -> Policy:
        """The fewest bytes: first versions compressed, positions by magnitude class, long chains."""
        return cls(max_chain=32, keyframe="planes", strata=True, pack_bytes=pack_bytes, threads=threads)

    @classmethod
    def lightest(cls, *, pack_bytes: int = 64 << 20, threads: int = 2) -> Policy:
        """The least work for whoever reads: first versions as they are, and plain positions."""
        return cls(max_chain=16, keyframe="raw", strata=False, pack_bytes=pack_bytes, threads=threads)

    def __post_init__(self) -> None:
        """Refuse what cannot be meant, before anything is written.

        Raises:
            MalformedError: input-invalid.
        """
        if not 2 <= self.max_chain <= MAX_DEPTH:
            _refuse("max_chain", f"2 to {MAX_DEPTH}", self.max_chain)
        if self.keyframe not in ("planes", "raw"):
            _refuse("keyframe", "'planes' or 'raw'", self.keyframe)
        if self.pack_bytes < 1:
            _refuse("pack_bytes", "at least 1", self.pack_bytes)
        if self.threads < 1:
            _refuse("threads", "at least 1", self.threads)
        check_device_choice(self.device, where="policy")


@dataclass(slots=True)
class StageCounts:
    """What a stage saw and wrote.

    Attributes:
        tensors, blocks: How many there are.
        changed_blocks: Blocks whose bits differ from the parent's, or that have no counterpart there.
        nbytes: Canonical bytes of all tensors.
        payload_bytes: Encoded bytes of this step's own pieces.
        rebase_bytes: Encoded bytes that replace prefixes of full chains.
        read_bytes: Decoded bytes that had to be read back from the store.
        encode_seconds: Wall time in comparing, hashing and encoding.
    """

    tensors: int = 0
    blocks: int = 0
    changed_blocks: int = 0
    nbytes: int = 0
    payload_bytes: int = 0
    rebase_bytes: int = 0
    read_bytes: int = 0
    encode_seconds: float = 0.0


def _refuse(what: str, expected: str, found: object) -> NoReturn:
    raise MalformedError(ErrorCode.INPUT_INVALID, f"{what} is {expected}, not {found!r}", where="policy")
