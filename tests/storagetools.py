"""What the tests of storages share."""

import os
from collections.abc import Callable

import pytest

from deltaformat.errors import DeltaFormatError, ErrorCode
from deltaformat.keys import pack_key, record_key
from deltaformat.storage import Storage

KEY = record_key(1)
PACK = pack_key(0, "ab" * 32)
posix = pytest.mark.skipif(os.name != "posix", reason="needs POSIX")


def code_of(call: Callable[[], object], error: type[DeltaFormatError]) -> ErrorCode:
    with pytest.raises(error) as caught:
        call()
    assert caught.value.where
    return caught.value.code


def listed(storage: Storage, prefix: str = "") -> list[str]:
    return sorted(info.key for info in storage.list(prefix))
