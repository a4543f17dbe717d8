"""Every error this package raises on purpose (SPEC 17).

::

    DeltaFormatError
    ├── MalformedError (ValueError)      bytes or arguments that break a grammar
    ├── UnsupportedError                 something this reader does not know
    ├── CorruptError                     bytes that are not what their hash says
    ├── MissingError (KeyError)          something that is not there
    ├── InconsistentError (ValueError)   parts that contradict each other
    ├── LimitError                       more than a stated cap allows
    ├── UnsafeError (ValueError)         a path or URL that could do harm
    ├── ConflictError                    another writer holds what is needed
    └── StoreError                       the storage answered with an error
        └── CommitUnknown                the outcome of a commit is not known

An error carries its `code` (what happened), `message` (one sentence that ends with what to do, where
something can be done) and `where` (the object, tensor or block).
"""

from __future__ import annotations

from enum import Enum

from deltaformat.redaction import redact

__all__ = [
    "CommitUnknown",
    "ConflictError",
    "CorruptError",
    "DeltaFormatError",
    "ErrorCode",
    "InconsistentError",
    "LimitError",
    "MalformedError",
    "MissingError",
    "StoreError",
    "UnsafeError",
    "UnsupportedError",
]

_SHOWN_WHERE = 300


class ErrorCode(Enum):
    """Codes of SPEC 17; `value` is the code as printed, `error_class` its class there."""

    JSON_INVALID = "json-invalid", "MALFORMED"
    VALUE_INVALID = "value-invalid", "MALFORMED"
    MANIFEST_INVALID = "manifest-invalid", "MALFORMED"
    PAYLOAD_INVALID = "payload-invalid", "MALFORMED"
    PACK_INVALID = "pack-invalid", "MALFORMED"
    INPUT_INVALID = "input-invalid", "MALFORMED"
    FEATURE_UNKNOWN = "feature-unknown", "UNSUPPORTED"
    FORMAT_UNKNOWN = "format-unknown", "UNSUPPORTED"
    DIGEST_UNKNOWN = "digest-unknown", "UNSUPPORTED"
    DTYPE_UNKNOWN = "dtype-unknown", "UNSUPPORTED"
    ENCODING_UNKNOWN = "encoding-unknown", "UNSUPPORTED"
    NOT_SUPPORTED = "not-supported", "UNSUPPORTED"
    DIGEST_MISMATCH = "digest-mismatch", "CORRUPT"
    HASH_MISMATCH = "hash-mismatch", "CORRUPT"
    SIZE_MISMATCH = "size-mismatch", "CORRUPT"
    FRAME_CORRUPT = "frame-corrupt", "CORRUPT"
    CHAIN_BROKEN = "chain-broken", "CORRUPT"
    STORE_MISSING = "store-missing", "MISSING"
    OBJECT_MISSING = "object-missing", "MISSING"
    VERSION_MISSING = "version-missing", "MISSING"
    VERSION_RETIRED = "version-retired", "MISSING"
    BRANCH_MISSING = "branch-missing", "MISSING"
    TAG_MISSING = "tag-missing", "MISSING"
    TENSOR_MISSING = "tensor-missing", "MISSING"
    FILE_MISSING = "file-missing", "MISSING"
    RECORD_VOID = "record-void", "INCONSISTENT"
    RECORD_MISPLACED = "record-misplaced", "INCONSISTENT"
    ROOT_MISMATCH = "root-mismatch", "INCONSISTENT"
    PARTS_DISAGREE = "parts-disagree", "INCONSISTENT"
    SET_CHANGED = "set-changed", "INCONSISTENT"
    STEP_NOT_ABOVE_HEAD = "step-not-above-head", "INCONSISTENT"
    NOT_LIVE = "not-live", "INCONSISTENT"
    LIMIT_EXCEEDED = "limit-exceeded", "LIMIT"
    PATH_UNSAFE = "path-unsafe", "UNSAFE"
    EXTERNAL_REFUSED = "external-refused", "UNSAFE"
    BRANCH_HELD = "branch-held", "CONFLICT"
    ALREADY_EXISTS = "already-exists", "CONFLICT"
    PARENT_MOVED = "parent-moved", "CONFLICT"
    STORE_FAILED = "store-failed", "STORE"
    CREATE_UNSAFE = "create-unsafe", "STORE"
    COMMIT_UNKNOWN = "commit-unknown", "STORE"

    error_class: str

    def __new__(cls, code: str, error_class: str = "") -> ErrorCode:
        """Make the member whose value is `code`; called with the code alone, an enum looks its member up."""
        member = object.__new__(cls)
        member._value_ = code
        member.error_class = error_class
        return member

    @property
    def value(self) -> str:
        """The code as printed; declared because type checkers do not see what `__new__` does."""
        return str(self._value_)


class DeltaFormatError(Exception):
    """Base of all errors of this package.

    Args:
        code: What happened; its class must be this exception's `error_class`.
        message: One sentence: what is wrong and what to do.
        where: The object key, tensor, block or argument concerned.

    Neither shows credentials of a URL, whoever put it there (DF-SEC-02).
    """

    error_class = ""

    def __init__(self, code: ErrorCode, message: str, *, where: str = "") -> None:
        if self.error_class and code.error_class != self.error_class:
            raise TypeError(f"{type(self).__name__} cannot carry {code.value}, a {code.error_class} code")
        self.code = code
        self.message = redact(message)
        self.where = redact(where)
        super().__init__(self.message)

    def __str__(self) -> str:
        """One line: where, message, code. Names come from anywhere: what would not print is escaped."""
        where = self.where if len(self.where) <= _SHOWN_WHERE else self.where[:_SHOWN_WHERE] + "..."
        line = f"{where}: {self.message}" if where else self.message
        if not line.isprintable():
            line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
        return f"{line} [{self.code.value}]"

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle with all three fields, so that errors cross process boundaries whole."""
        return _rebuild, (type(self), self.code, self.message, self.where)


def _rebuild(kind: type[DeltaFormatError], code: ErrorCode, message: str, where: str) -> DeltaFormatError:
    return kind(code, message, where=where)


class MalformedError(DeltaFormatError, ValueError):
    """Bytes or arguments that break a grammar."""

    error_class = "MALFORMED"


class UnsupportedError(DeltaFormatError):
    """A feature, format, digest, dtype or request this implementation does not know."""

    error_class = "UNSUPPORTED"


class CorruptError(DeltaFormatError):
    """Bytes that are not what their digest, hash or size says."""

    error_class = "CORRUPT"


class MissingError(DeltaFormatError, KeyError):
    """A store, object, version, branch, tag, tensor or file that is not there."""

    error_class = "MISSING"


class InconsistentError(DeltaFormatError, ValueError):
    """Things that are each well-formed and contradict each other."""

    error_class = "INCONSISTENT"


class LimitError(DeltaFormatError):
    """More than SPEC 16 or a stated cap allows."""

    error_class = "LIMIT"


class UnsafeError(DeltaFormatError, ValueError):
    """A path or URL that could reach what it must not."""

    error_class = "UNSAFE"


class ConflictError(DeltaFormatError):
    """Another writer holds the branch, or a name is taken."""

    error_class = "CONFLICT"


class StoreError(DeltaFormatError):
    """The storage failed, or cannot be trusted with commits.

    Args:
        code: As for DeltaFormatError; message, where: too.
        passing: Whether the same request may succeed later, as far as is known. Denied access, or a bucket
            that is not there, does not pass: followers that watch raise it and do not try again.
    """

    error_class = "STORE"

    def __init__(self, code: ErrorCode, message: str, *, where: str = "", passing: bool = True) -> None:
        super().__init__(code, message, where=where)
        self.passing = passing and code is not ErrorCode.CREATE_UNSAFE

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle with `passing`, too."""
        return (*super().__reduce__(), {"passing": self.passing})


class CommitUnknown(StoreError):
    """A commit's outcome could not be learned; the writer that raised it writes no more (DF-CMT-03)."""
