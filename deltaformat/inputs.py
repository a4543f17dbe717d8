"""What a caller gives to a writer, as a stage takes it: tensors of the host, surveys of those on devices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from deltaformat.errors import DeltaFormatError, ErrorCode, MalformedError
from deltaformat.gpu.engines import load_torch, on_device, stays_on_device
from deltaformat.gpu.survey import DeviceBaseline, DeviceTensor, Survey
from deltaformat.gpu.table import batches
from deltaformat.policy import Policy
from deltaformat.tensors import HostTensor, check_name, snapshot, to_host
from deltaformat.torchtensors import describe, is_torch

__all__ = ["Inputs", "Tensors", "total_bytes"]

Tensors = Mapping[str, object] | Iterable[tuple[str, object]]
Source = HostTensor | DeviceTensor


class Inputs:
    """Takes tensors from callers, by a policy.

    Args:
        policy: Says which tensors are hashed and compared on their device.
        baseline: What the writer keeps on devices.
    """

    def __init__(self, policy: Policy, baseline: DeviceBaseline) -> None:
        self._policy = policy
        self._baseline = baseline

    def take(self, tensors: Tensors) -> Iterator[tuple[str, Source]]:
        """Take tensors in order, as they are now or when they are reached.

        A dict's tensors on devices are surveyed together. A stream may reuse its buffer after each tensor,
        and another mapping make its tensors when they are asked for, so each of those is surveyed alone.
        """
        if isinstance(tensors, dict):
            yield from self._surveyed(list(_pairs(tensors)))
            return
        for name, tensor in _pairs(tensors):
            if self._stays(tensor):
                yield from self._surveyed([(name, tensor)])
            else:
                yield name, to_host(name, tensor)

    def copies(self, tensors: Tensors) -> Iterator[tuple[str, Source]]:
        """Take copies of tensors now, so that they may change afterwards.

        Of a tensor on a device the copy is there if the version before is kept there as well, and replaces it
        in the end; otherwise it is on the host.
        """
        copied: list[tuple[str, Any]] = []
        events: dict[Any, Any] = {}
        for name, tensor in _pairs(tensors):
            if self._stays(tensor) and self._policy.device_baseline:
                _checked(name, tensor)
                copy, event = _copy_in_place(tensor)
                events[copy.device] = event
                copied.append((name, copy))
                continue
            host = to_host(name, tensor)
            own = is_torch(tensor) and on_device(tensor)  # what came from a device is a copy already
            copied.append((name, host if own else snapshot(host)))
        return self._surveyed(copied, copies=events)

    def _stays(self, tensor: object) -> bool:
        """Whether a tensor is hashed and compared where it is."""
        return stays_on_device(tensor, self._policy.device)

    def _surveyed(
        self, pairs: list[tuple[str, Any]], *, copies: Mapping[Any, Any] | None = None
    ) -> Iterator[tuple[str, Source]]:
        """Give tensors in order; those that stay on their device in surveys of bounded memory.

        With `copies` nobody else has them, and it gives for each device an event after which they stand.
        """
        staying = [number for number, (_, tensor) in enumerate(pairs) if self._stays(tensor)]
        for number in staying:
            _checked(*pairs[number])
        members: dict[int, DeviceTensor] = {}
        groups = [[staying[at] for at in batch] for batch in batches([pairs[n][1] for n in staying])]
        group_of = {number: group for group in groups for number in group}
        for number, (name, tensor) in enumerate(pairs):
            group = group_of.get(number)
            if group is None:
                yield name, to_host(name, tensor)
                continue
            if number not in members:
                chosen = [pairs[member] for member in group]
                ready = copies.get(tensor.device) if copies is not None else None
                survey = Survey(self._baseline, chosen, own=copies is not None, ready=ready)
                members.update(zip(group, survey.members, strict=True))
            yield name, members.pop(number)


def _copy_in_place(tensor: Any) -> tuple[Any, Any]:
    """A tensor's copy on its device, and an event after which it stands."""
    copy = tensor.detach().clone()
    if tensor.device.type != "cuda":
        return copy, None
    torch = load_torch()
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(tensor.device))
    return copy, event


def _checked(name: object, tensor: Any) -> None:
    """Refuse a name or tensor that cannot be stored, and say which."""
    check_name(name)
    try:
        describe(tensor)
    except DeltaFormatError as error:
        raise type(error)(error.code, error.message, where=f"tensor {str(name)[:200]!a}") from None


def _pairs(tensors: Tensors) -> Iterator[tuple[str, object]]:
    pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
    if not isinstance(pairs, Iterable):
        raise _no_tensors(tensors)
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise _no_tensors(pair)
        yield pair[0], pair[1]


def _no_tensors(given: object) -> MalformedError:
    return MalformedError(
        ErrorCode.INPUT_INVALID,
        f"{type(given).__name__} is neither a mapping of names to tensors nor a (name, tensor) pair of a"
        " stream; of a module pass state_dict()",
        where="tensors",
    )


def total_bytes(tensors: Tensors) -> int | None:
    """Canonical bytes of a mapping of arrays, for progress; None where it is not known without reading."""
    if not isinstance(tensors, Mapping):
        return None
    try:
        total: int = sum(tensor.nbytes for tensor in tensors.values())  # type: ignore[union-attr]  # any type
        return total
    except Exception:  # of a sparse tensor, say: what is wrong with it is told when it is staged
        return None
