"""Builds the conformance cases from SPEC.md, byte by byte; nothing of the library's has a part in it.

`primitives`, `payloads` and `arrowfile` make objects, `store` puts them together, `suite` holds cases and
writes them, and each `cases_*` module makes those of some sections of SPEC.md.
"""
