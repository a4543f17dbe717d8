"""Stores in buckets: a real S3 server runs every test of storages; then credentials, failures, URLs."""

import itertools
import secrets

import pytest

from deltaformat.storage import Storage, open_storage
from deltaformat.testing import StorageTests

numbers = itertools.count()


def fresh():
    return f"s3://tests/{secrets.token_hex(4)}-{next(numbers)}"


class TestRealS3(StorageTests):
    @pytest.fixture
    def storage(self, s3_server) -> Storage:
        return open_storage(fresh(), options=s3_server.options())
