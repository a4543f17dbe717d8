"""A store in a dict, weights that every step determines, and what a log says in plain JSON: for tests that
break things.
"""

import json
import threading
from datetime import UTC, datetime, timedelta
from functools import cache

import ml_dtypes
import numpy as np

from deltaformat.errors import CorruptError, ErrorCode, LimitError, MissingError
from deltaformat.keys import parse_key
from deltaformat.storage import ObjectInfo, chunks_of

__all__ = ["BLOCK", "DictStorage", "committed", "content", "named_objects", "records", "truth", "weights"]

BLOCK = 256
EPOCH = datetime(2026, 1, 1, tzinfo=UTC)


class DictStorage:
    """A storage whose objects are `objects`, key -> bytes, and whose clock is `now`; every write takes a
    millisecond of it.
    """

    url = "dict"

    def __init__(self, objects=()):
        self.objects = dict(objects)
        self.now = EPOCH
        self.times = dict.fromkeys(self.objects, EPOCH)
        self._lock = threading.Lock()

    def copy(self):
        other = DictStorage(self.objects)
        other.now, other.times = self.now, dict(self.times)
        return other

    def advance(self, **amount):
        self.now += timedelta(**amount)

    def get(self, key, *, limit=None):
        data = self._find(key)
        if limit is not None and len(data) > limit:
            raise LimitError(ErrorCode.LIMIT_EXCEEDED, f"has {len(data)} bytes", where=key)
        return data

    def get_ranges(self, key, ranges):
        data = self._find(key)
        found = [data[start : start + length] for start, length in ranges]
        if any(len(part) != length for part, (_, length) in zip(found, ranges, strict=True)):
            raise CorruptError(ErrorCode.SIZE_MISMATCH, "is shorter than it must be", where=key)
        return found

    def put(self, key, data):
        parse_key(key)
        data = b"".join(bytes(memoryview(chunk)) for chunk in chunks_of(data))
        with self._lock:
            self._store(key, data)

    def create(self, key, data):
        parse_key(key)
        data = b"".join(bytes(memoryview(chunk)) for chunk in chunks_of(data))
        with self._lock:
            if key in self.objects:
                return False
            self._store(key, data)
            return True

    def head(self, key):
        data = self._find(key)
        return ObjectInfo(key, len(data), self.times.get(key, EPOCH))

    def list(self, prefix):
        with self._lock:
            keys = sorted(key for key in self.objects if key.startswith(prefix))
        return iter([self.head(key) for key in keys])

    def delete(self, keys):
        for key in keys:
            parse_key(key)
            with self._lock:
                self.objects.pop(key, None)

    def _find(self, key):
        parse_key(key)
        try:
            return self.objects[key]
        except KeyError:
            raise MissingError(ErrorCode.OBJECT_MISSING, "is not in the store", where=key) from None

    def _store(self, key, data):
        self.now += timedelta(milliseconds=1)
        self.objects[key], self.times[key] = data, self.now


@cache
def _walk(seed):
    values = np.random.default_rng(seed).standard_normal(640).astype(np.float32) * 0.02
    return [values.astype(ml_dtypes.bfloat16).view(np.uint16)]


def _bits(step, seed):
    """The bits of `w`, from step to step: a few of 640 elements move, by one in the last place or far."""
    walk = _walk(seed)
    for number in range(len(walk), step + 1):
        rng = np.random.default_rng((seed, number))
        bits = walk[-1].copy()
        bits[rng.integers(0, 640, 12)] += rng.choice([1, 2, 0xFFFF], 12).astype(np.uint16)
        bits[rng.integers(0, 640)] = rng.choice([0x7FC1, 0x8000, 0x0000])  # a NaN with a payload, -0.0, 0.0
        walk.append(bits)
    return walk[step]


def weights(step, seed=0):
    """The tensors of a step: sparse changes, dense ones, none, a tied pair, odd sizes, 0-d, empty, in blocks
    of 256 bytes.
    """
    w = _bits(step, seed).view(ml_dtypes.bfloat16).reshape(40, 16)
    rng = np.random.default_rng((seed, step, 1))
    return {
        "w": w,
        "tied": w,
        "frozen": (np.arange(300) * 7 % 251).astype(np.uint8),
        "noise": rng.integers(0, 1 << 32, 70, np.uint32),
        "drift/é": (np.arange(129) * 0.1 + step * 1e-3).astype(np.float32),
        "step": np.float32(step),
        "empty": np.zeros((0, 4), np.float16),
    }


def content(tensors):
    """Names -> (dtype, shape, bytes), for comparisons bit by bit."""
    return {
        name: (str(a.dtype), a.shape, a.tobytes())
        for name, a in ((n, np.asarray(t)) for n, t in tensors.items())
    }


@cache
def truth(step, seed=0):
    """What a step must read back as."""
    return content(weights(step, seed))


def records(storage):
    """All records of a log that can be read, as JSON members."""
    keys = sorted(key for key in storage.objects if key.startswith("log/"))
    return [json.loads(storage.objects[key]) for key in keys]


def committed(storage, branch="main"):
    """Steps of the branch's commit records, in log order."""
    return [r["step"] for r in records(storage) if r["kind"] == "commit" and r["branch"] == branch]


def named_objects(storage):
    """Keys of all manifests, packs and files that any commit record names."""
    names = set()
    for record in records(storage):
        if record["kind"] == "commit":
            names.update(ref["key"] for ref in (*record["manifests"], *record["objects_added"]))
    return names
