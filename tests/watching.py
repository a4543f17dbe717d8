"""Storages that watch or disturb another one: what was asked of it, in which order, and what fails."""

import threading

from deltaformat.errors import ErrorCode, StoreError
from deltaformat.storage import NotStoredError

__all__ = ["Call", "Faulty", "Recorder", "Wrapper", "failure", "not_stored"]


class Wrapper:
    """Passes every operation on; `before` and `after` see each."""

    def __init__(self, inner):
        self.inner = inner

    @property
    def url(self):
        return self.inner.url

    def before(self, operation, key, argument=None):
        pass

    def after(self, operation, key, result=None):
        pass

    def _pass(self, operation, key, argument, call):
        self.before(operation, key, argument)
        result = call()
        self.after(operation, key, result)
        return result

    def get(self, key, *, limit=None):
        return self._pass("get", key, limit, lambda: self.inner.get(key, limit=limit))

    def get_ranges(self, key, ranges):
        return self._pass("get_ranges", key, ranges, lambda: self.inner.get_ranges(key, ranges))

    def put(self, key, data):
        return self._pass("put", key, data, lambda: self.inner.put(key, data))

    def create(self, key, data):
        return self._pass("create", key, data, lambda: self.inner.create(key, data))

    def head(self, key):
        return self._pass("head", key, None, lambda: self.inner.head(key))

    def list(self, prefix):
        return iter(self._pass("list", prefix, None, lambda: list(self.inner.list(prefix))))

    def delete(self, keys):
        return self._pass("delete", ",".join(keys), keys, lambda: self.inner.delete(keys))


class Call:
    """One operation that a `Recorder` has seen; of `get_ranges`, `argument` has the ranges."""

    def __init__(self, operation, key, argument):
        self.operation, self.key, self.argument = operation, key, argument

    def __repr__(self):
        return f"{self.operation} {self.key}"

    @property
    def nbytes(self):
        return sum(length for _, length in self.argument)


class Recorder(Wrapper):
    """Keeps every call, in the order in which they began."""

    def __init__(self, inner):
        super().__init__(inner)
        self.calls = []
        self._lock = threading.Lock()

    def before(self, operation, key, argument=None):
        with self._lock:
            self.calls.append(Call(operation, key, argument))

    def of(self, operation, prefix=""):
        """The calls of one operation whose key begins with `prefix`."""
        with self._lock:
            return [
                call for call in self.calls if call.operation == operation and call.key.startswith(prefix)
            ]

    def clear(self):
        with self._lock:
            self.calls.clear()


class Faulty(Wrapper):
    """Raises what `fault(operation, key)` returns, before the call or, with `late`, after it has been
    carried out.
    """

    def __init__(self, inner, fault=None, *, late=False):
        super().__init__(inner)
        self.fault = fault or self.none
        self.late = late

    @staticmethod
    def none(operation, key):
        """No fault."""

    def before(self, operation, key, argument=None):
        if not self.late:
            self._raise(operation, key)

    def after(self, operation, key, result=None):
        if self.late:
            self._raise(operation, key)

    def _raise(self, operation, key):
        error = self.fault(operation, key)
        if error is not None:
            raise error


def failure(key=""):
    """What a store raises whose answer says nothing about what it did."""
    return StoreError(ErrorCode.STORE_FAILED, "the store failed: on purpose", where=key)


def not_stored(key=""):
    """What a store raises that certainly has stored nothing."""
    return NotStoredError(ErrorCode.STORE_FAILED, "the store failed: on purpose", where=key)
