"""Versioned model weights in a bucket or a directory; any step and any slice comes back bit for bit.

    import deltaformat as df
    store = df.create("run/")
    with store.writer() as writer:
        writer.commit(step=0, tensors=model.state_dict())
    with store.version(step=0, framework="pt") as version:
        rows = version.get_slice("layer.0.weight")[0:16]

The format is specified in SPEC.md; errors are in `deltaformat.errors`.
"""

from deltaformat import errors
from deltaformat.collect import GcReport, Retention
from deltaformat.commitinfo import CommitFuture, CommitInfo
from deltaformat.follower import Follower
from deltaformat.metrics import FollowMetrics, FollowPhase, FollowStatus
from deltaformat.opening import create, open
from deltaformat.part import Part, Ticket
from deltaformat.patches import Patch
from deltaformat.policy import Policy
from deltaformat.reader import TensorInfo, TensorSlice, Version
from deltaformat.staged import Staged
from deltaformat.stager import Progress, Stager
from deltaformat.store import Store
from deltaformat.sync import CheckpointSync, SyncReport
from deltaformat.tensors import TensorBytes
from deltaformat.verify import Finding, VerifyReport
from deltaformat.writer import Writer

__version__ = "0.1.0"

__all__ = [
    "CheckpointSync",
    "CommitFuture",
    "CommitInfo",
    "Finding",
    "FollowMetrics",
    "FollowPhase",
    "FollowStatus",
    "Follower",
    "GcReport",
    "Part",
    "Patch",
    "Policy",
    "Progress",
    "Retention",
    "Staged",
    "Stager",
    "Store",
    "SyncReport",
    "TensorBytes",
    "TensorInfo",
    "TensorSlice",
    "Ticket",
    "VerifyReport",
    "Version",
    "Writer",
    "create",
    "errors",
    "open",
]
