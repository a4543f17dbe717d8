"""Storages for tests of writers: what was asked in which order, and faults that a test turns on and off."""

from wrappers import Counting, Wrapper

from deltaformat.errors import ErrorCode, StoreError
from deltaformat.storage import NotStoredError

__all__ = ["Faulty", "Recorder", "failure", "not_stored"]


class Recorder(Counting):
    """Keeps every request, in the order in which they began."""

    def of(self, operation, prefix=""):
        """The requests of one operation whose key begins with `prefix`."""
        return [
            request
            for request in self.requests
            if request.operation == operation and request.key.startswith(prefix)
        ]


class Faulty(Wrapper):
    """Raises what `fault(operation, key)` gives, before an operation or, with `late`, after it was executed."""

    def __init__(self, inner, *, late=False):
        super().__init__(inner)
        self.fault = self.none
        self.late = late

    @staticmethod
    def none(operation, key):
        """No fault."""

    def around(self, operation, key, run):
        if not self.late:
            self._fail(operation, key)
        result = run()
        if self.late:
            self._fail(operation, key)
        return result

    def _fail(self, operation, key):
        error = self.fault(operation, key)
        if error is not None:
            raise error


def failure(key):
    """What a store raises whose answer says nothing about what it did."""
    return StoreError(ErrorCode.STORE_FAILED, "the store failed: on purpose", where=key)


def not_stored(key):
    """What a store raises that certainly has stored nothing."""
    return NotStoredError(ErrorCode.STORE_FAILED, "the store failed: on purpose", where=key)
