"""Versions made of parts that several stagers, also in other processes, have made durable (SPEC 14)."""

import multiprocessing
import pickle

import numpy as np
import pytest
from writertools import check_follow, kinds, make, reads, state, trained

import deltaformat as df
from deltaformat import Part, Ticket
from deltaformat.errors import (
    ConflictError,
    CorruptError,
    ErrorCode,
    InconsistentError,
    MalformedError,
)


def test_parts_make_a_version():
    """DF-MAN-05, DF-CMT-06: parts, an overlap that agrees, and tensors given beside them; counts are sums."""
    store, first = make(), state(10, 6)
    second = trained(first)
    with store.writer() as writer:
        for step, tensors in enumerate((first, second)):
            items = list(tensors.items())
            parts = [
                writer.stage(step=step, tensors=items[:3]),
                writer.stage(step=step, tensors=dict(items[2:5])),  # w2 in both
            ]
            assert kinds(store).count("commit") == step  # staging is invisible
            info = writer.commit(step=step, tensors=items[5:], parts=parts)
            assert info.tensors == 6
            assert info.packs == 3
            assert info.pack_bytes >= sum(part.pack_bytes for part in parts)
            reads(store.version(step=step), tensors)
    check_follow(store, 0, 1, second)
    assert store.verify(all=True).findings == []


def test_parts_that_disagree_are_refused():
    """DF-MAN-05: two ranks that publish different values for one name; a part of another step or store."""
    store, first = make(), state(11)
    other = make()
    with store.writer() as writer, other.writer() as elsewhere:
        good = writer.stage(step=0, tensors=first)
        for wrong in (
            writer.stage(step=0, tensors={"w1": first["w2"]}),
            writer.stage(step=0, tensors={"w1": first["w1"].view(np.float16)}),
            writer.stage(step=0, tensors={"w1": first["w1"].reshape(20, 24)}),
            writer.stage(step=1, tensors={"more": first["w1"]}),
            elsewhere.stage(step=0, tensors={"more": first["w1"]}),
        ):
            with pytest.raises(InconsistentError) as caught:
                writer.commit(step=0, parts=[good, wrong])
            assert caught.value.code is ErrorCode.PARTS_DISAGREE
        with pytest.raises(InconsistentError):
            writer.commit(step=0, parts=[good], tensors={"w0": first["w1"]})
        assert kinds(store) == ["claim"]
        writer.commit(step=0, parts=[good])
    reads(store.version(), first)


def test_a_part_against_another_head_is_refused():
    """DF-CMT-06: its pieces may rest on what is not the parent."""
    store, first = make(), state(12)
    with store.writer() as writer:
        early = writer.stage(step=1, tensors=first)
        writer.commit(step=0, tensors=first)
        with pytest.raises(ConflictError, match="stage it again") as caught:
            writer.commit(step=1, parts=[early])
        assert caught.value.code is ErrorCode.PARENT_MOVED
        part = writer.stage(step=2, tensors=trained(first))
    with store.writer() as writer:
        with pytest.raises(
            ConflictError
        ) as caught:  # the same head, but the claim that covers its packs is fenced
            writer.commit(step=2, parts=[part])
        assert caught.value.code is ErrorCode.PARENT_MOVED
        writer.commit(step=2, tensors=trained(first))
    assert store.verify(all=True).findings == []


def test_parts_travel():
    """A part is the same after pickle and after to_bytes, and is committed under the name it had."""
    store, first = make(), state(13)
    with store.writer() as writer:
        part = writer.stage(step=0, tensors=first)
        copies = [pickle.loads(pickle.dumps(part)), Part.from_bytes(part.to_bytes())]
        assert copies == [part, part]
        info = writer.commit(step=0, parts=copies)
        assert info.root == store.version().root
    reads(store.version(), first)


def test_damaged_parts_are_refused():
    """DF-CMT-01, DF-DIG-04: every byte flipped and cut in turn; no damaged part makes a version."""
    store, first = make(), state(14, 1)
    with store.writer() as writer:
        data = writer.stage(step=0, tensors=first).to_bytes()
        for at in range(len(data)):
            for damaged in (
                data[:at],
                data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :],
                data[:at] + bytes([data[at] ^ 0x01]) + data[at + 1 :],
            ):
                with pytest.raises((MalformedError, CorruptError)):
                    Part.from_bytes(damaged)
        for junk in (b"", b"{}", data + b"x", b"\0" * 100):
            with pytest.raises((MalformedError, CorruptError)):
                Part.from_bytes(junk)
        writer.commit(step=0, parts=[Part.from_bytes(data)])
    reads(store.version(), first)


def test_tickets():
    store = make()
    with store.writer("a:b/c".replace(":", "-")) as writer:
        ticket = writer.ticket
        assert Ticket.parse(str(ticket)) == ticket == Ticket(store.uuid, "a-b/c", 0)
        assert store.stager(str(ticket)).branch == "a-b/c" == writer.branch
        for wrong in (
            "",
            "x",
            f"{store.uuid}:x:main",
            f"{store.uuid}:1",
            f"{store.uuid}:1:",
            ":1:main",
            f"{store.uuid}:{'9' * 5000}:main",
        ):
            with pytest.raises(MalformedError):
                store.stager(wrong)
        with pytest.raises(MalformedError, match="another store"):
            make().stager(ticket)


def test_a_stager_goes_from_step_to_step():
    """Each rank holds its own baseline; nothing moves before the commit of all (DF-WR-01)."""
    store, tensors = make(), state(15, 4)
    names = [("w0", "w1"), ("w2", "w3")]
    states = []
    with store.writer() as writer:
        ranks = [df.open(store._context.storage).stager(str(writer.ticket)) for _ in names]
        for step in range(5):
            failed = trained(tensors, 100 + step)
            for rank, mine in zip(ranks, names, strict=True):
                rank.stage(step=step, tensors={name: failed[name] for name in mine})  # never committed
            parts = [
                rank.stage(step=step, tensors={name: tensors[name] for name in mine})
                for rank, mine in zip(ranks, names, strict=True)
            ]
            info = writer.commit(step=step, parts=parts)
            if step:
                assert info.payload_bytes < 8 * 40
            states.append(tensors)
            tensors = trained(tensors, step)
    for step, expected in enumerate(states):
        reads(store.version(step=step), expected)
        if step:
            check_follow(store, step - 1, step, expected)
    with store.writer(), pytest.raises(ConflictError, match="held by"):
        ranks[0].stage(step=6, tensors={})


def stage_elsewhere(url, ticket, step, seeds, names, queue):
    tensors = state(seeds[0])
    for seed in seeds[1:]:
        tensors = trained(tensors, seed)
    stager = df.open(url).stager(ticket)
    queue.put(stager.stage(step=step, tensors={name: tensors[name] for name in names}).to_bytes())


def test_two_processes_stage_what_a_third_commits(tmp_path):
    """SPEC 14: ranks stage under the writer's ticket, and see the head that they build on."""
    store = make(tmp_path / "store")
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    with store.writer() as writer:
        writer.commit(step=0, tensors=state(16))
        ranks = [
            context.Process(
                target=stage_elsewhere,
                args=(str(tmp_path / "store"), str(writer.ticket), 1, (16, 5), names, queue),
            )
            for names in (("w0", "w3"), ("w1", "w2"))
        ]
        for rank in ranks:
            rank.start()
        parts = [Part.from_bytes(queue.get(timeout=120)) for _ in ranks]
        for rank in ranks:
            rank.join()
        info = writer.commit(step=1, parts=parts)
    expected = trained(state(16), 5)
    assert info.payload_bytes < 4 * 40
    reads(df.open(tmp_path / "store").version(step=1), expected)
    check_follow(store, 0, 1, expected)
