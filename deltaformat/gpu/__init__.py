"""Hash, compare and patch weights on the device where they are.

Digests are bit-identical to the CPU's (SPEC 7), whichever engine computes them: Triton's kernels on CUDA
devices, or torch's own operations anywhere. Under `xxh3-128` an equal root rules out accidents; only
`blake3-256` is evidence. Needs torch: `pip install deltaformat[gpu]`.
"""

from deltaformat.gpu.applying import apply
from deltaformat.gpu.diffing import BlockDiff, diff
from deltaformat.gpu.hashing import hash_blocks

__all__ = ["BlockDiff", "apply", "diff", "hash_blocks"]
