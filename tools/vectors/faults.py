"""Classes and codes of SPEC 17 that cases expect, by short names."""

from __future__ import annotations

__all__ = [
    "CORRUPT",
    "FRAME",
    "JSON",
    "LIMIT",
    "MANIFEST",
    "MISSING",
    "MISSING_VERSION",
    "PAYLOAD",
    "UNKNOWN",
    "VALUE",
    "VOID",
]

JSON = ("MALFORMED", "json-invalid")
VALUE = ("MALFORMED", "value-invalid")
MANIFEST = ("MALFORMED", "manifest-invalid")
PAYLOAD = ("MALFORMED", "payload-invalid")
UNKNOWN = ("UNSUPPORTED", "encoding-unknown")
CORRUPT = ("CORRUPT", "digest-mismatch")
FRAME = ("CORRUPT", "frame-corrupt")
MISSING = ("MISSING", "object-missing")
MISSING_VERSION = ("MISSING", "version-missing")
VOID = ("INCONSISTENT", "record-void")
LIMIT = ("LIMIT", "limit-exceeded")
