"""The tree of errors: classes are what callers handle, codes what happened."""

import copy
import inspect
import pickle

import pytest

from deltaformat import errors
from deltaformat.errors import CommitUnknown, DeltaFormatError, ErrorCode

TREE = {
    "MalformedError": ("MALFORMED", ValueError),
    "UnsupportedError": ("UNSUPPORTED", Exception),
    "CorruptError": ("CORRUPT", Exception),
    "MissingError": ("MISSING", KeyError),
    "InconsistentError": ("INCONSISTENT", ValueError),
    "LimitError": ("LIMIT", Exception),
    "UnsafeError": ("UNSAFE", ValueError),
    "ConflictError": ("CONFLICT", Exception),
    "StoreError": ("STORE", Exception),
}
CLASSES = [getattr(errors, name) for name in TREE]


def codes(kind):
    return [code for code in ErrorCode if code.error_class == kind.error_class]


def test_the_tree():
    """DF-ERR-01: one exception for each class of the table, and under it what a caller may treat apart."""
    for name, (error_class, builtin) in TREE.items():
        kind = getattr(errors, name)
        assert kind.error_class == error_class
        assert issubclass(kind, builtin)
        assert kind.__bases__[0] is DeltaFormatError
    assert CommitUnknown.__bases__ == (errors.StoreError,)
    assert CommitUnknown.error_class == "STORE"
    public = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and value.__module__ == errors.__name__
    }
    assert public == {*TREE, "CommitUnknown", "DeltaFormatError", "ErrorCode"} == set(errors.__all__)


def test_every_code_has_a_class_and_every_class_a_code():
    """DF-ERR-01."""
    assert {code.error_class for code in ErrorCode} == {error_class for error_class, _ in TREE.values()}
    assert len({code.value for code in ErrorCode}) == len(ErrorCode) == len(ErrorCode.__members__)
    for code in ErrorCode:
        assert code.name.lower().replace("_", "-") == code.value
        assert ErrorCode(code.value) is code


@pytest.mark.parametrize("kind", CLASSES)
def test_a_class_carries_its_own_codes_only(kind):
    """DF-ERR-01."""
    for code in ErrorCode:
        if code in codes(kind):
            assert kind(code, "message").code is code
        else:
            with pytest.raises(TypeError, match=code.value):
                kind(code, "message")


@pytest.mark.parametrize("kind", [*CLASSES, CommitUnknown])
def test_pickling_and_copying_keep_everything(kind):
    error = kind(codes(kind)[0], "it is broken; mend it", where="packs/1")
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(twin) is kind
        assert (twin.code, twin.message, twin.where) == (error.code, error.message, error.where)
        assert twin.args == error.args
        assert str(twin) == str(error)


@pytest.mark.parametrize("kind", CLASSES)
def test_str_is_where_message_code(kind):
    code = codes(kind)[0]
    assert str(kind(code, "it is broken", where="log/7")) == f"log/7: it is broken [{code.value}]"
    assert str(kind(code, "it is broken")) == f"it is broken [{code.value}]"


@pytest.mark.parametrize("text", ["a\nb", "a\r\nb", "\x1b[31m", "\0", "\u2028", "\ud800", "x" * 4_000 + "\n"])
def test_str_is_one_printable_line(text):
    """Names are data: they do not break lines or steer terminals."""
    for error in (
        errors.MissingError(ErrorCode.TENSOR_MISSING, "no such tensor", where=text),
        errors.MissingError(ErrorCode.TENSOR_MISSING, f"no tensor {text[:100]}"),
    ):
        assert len(str(error).splitlines()) == 1
        assert str(error).isprintable()
        assert len(str(error)) < 500
    assert errors.MissingError(ErrorCode.TENSOR_MISSING, "", where=text).where == text


def test_letters_of_all_scripts_stay():
    assert str(errors.MissingError(ErrorCode.BRANCH_MISSING, "größer, 大", where="é")).startswith(
        "é: größer, 大 ["
    )


def test_whether_a_failure_of_a_store_may_pass():
    """Unless said otherwise it may; that *create* is unsafe does not. Copies keep it."""
    assert errors.StoreError(ErrorCode.STORE_FAILED, "x").passing
    assert not errors.StoreError(ErrorCode.CREATE_UNSAFE, "x").passing
    for passing in (True, False):
        error = CommitUnknown(ErrorCode.COMMIT_UNKNOWN, "x", where="log", passing=passing)
        again = pickle.loads(pickle.dumps(error))
        assert (again.passing, again.where, type(again)) == (passing, "log", CommitUnknown)
