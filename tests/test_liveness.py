"""Which objects commits use: against a fold with a set for each commit."""

from hypothesis import given
from hypothesis import strategies as st
from logmaker import LogMaker, pack, sha

from deltaformat.history import History
from deltaformat.keys import pack_key
from deltaformat.liveness import ObjectUse, object_uses
from deltaformat.records import Claim, Fork, ObjectRef, Retire


def uses_by_sets(history: History) -> dict[str, ObjectUse]:
    """The fold, commit by commit, with a set for each."""
    held: dict[int, set[str]] = {}
    sizes: dict[str, int] = {}
    for seq, commit in sorted(history.commits.items()):
        objects = set() if commit.parent is None else set(held[commit.parent])
        objects -= {ref.key for ref in commit.objects_dropped}
        objects |= {ref.key for ref in commit.objects_added}
        held[seq] = objects
        sizes |= {r.key: r.size for r in (*commit.objects_dropped, *commit.objects_added, *commit.manifests)}
    for seq, commit in history.commits.items():
        held[seq] = {*(key for key in held[seq] if "packs" in key), *(ref.key for ref in commit.manifests)}
    uses = {}
    for key in sizes:
        users = [seq for seq, objects in held.items() if key in objects]
        heads = {head.seq for head in history.state.heads.values()}
        live = any(seq in history.live or seq in heads for seq in users)
        retired = [history.retired[seq] for seq in users if seq in history.retired]
        uses[key] = ObjectUse(sizes[key], live, None if live or not retired else max(retired))
    return uses


@given(st.data())
def test_objects_by_sets(data: st.DataObject) -> None:
    """Section 12.6, DF-LOG-12: an object is live while a live commit or a head uses it; with forks, rewinds,
    drops, also from commits that were retired.
    """
    maker = LogMaker()
    claims = {"main": maker.claim().seq}
    keys: list[ObjectRef] = []
    for i in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["commit"] * 5 + ["fork", "rewind", "retire", "drop", "claim"]))
        branch = data.draw(st.sampled_from(sorted(claims)))
        commits = sorted(maker.history.commits)
        heads = {head.seq for head in maker.state.heads.values()}
        free = [seq for seq in commits if seq not in heads]
        if action == "commit":
            new = [pack(claims[branch], (i, j)) for j in range(data.draw(st.integers(0, 2)))]
            keys += new
            known = st.lists(st.sampled_from(keys), max_size=3) if keys else st.just([])
            again = [ref for ref in data.draw(known) if f"/{claims[branch]:020}/" in ref.key]
            maker.commit(branch, objects_added=(*new, *again), objects_dropped=tuple(data.draw(known)))
        elif action == "fork" and commits:
            name = f"b{i}"
            source = data.draw(st.sampled_from(commits))
            if source in maker.history.live:
                maker.fork(name, source)
            else:
                step = maker.history.commits[source].step
                maker.add_careless(Fork, branch=name, source=source, step=step)
            claims[name] = maker.claim(name).seq
        elif action == "rewind" and maker.state.heads[branch].seq is not None:
            lineage = [c.seq for c in maker.history.lineage(maker.state.heads[branch].seq)]  # type: ignore[arg-type]
            target = data.draw(st.sampled_from(lineage))
            if target in maker.history.live:
                claims[branch] = maker.claim(branch, resume_from=target).seq
            else:
                members = {"epoch": maker.state.heads[branch].epoch + 1, "host": "", "pid": 0}
                claims[branch] = maker.add_careless(Claim, branch=branch, resume_from=target, **members).seq
        elif action == "retire" and free:
            doomed = tuple(sorted(data.draw(st.sets(st.sampled_from(free), min_size=1))))
            if maker.history.live.issuperset(doomed):
                maker.retire(*doomed)
            else:
                maker.add_careless(Retire, commits=doomed)
        elif action == "drop" and len(claims) > 1:
            maker.drop(branch)
            del claims[branch]
        elif action == "claim":
            claims[branch] = maker.claim(branch).seq
    assert not maker.history.void
    assert object_uses(maker.history) == uses_by_sets(maker.history)


def test_objects_of_a_long_log() -> None:
    """Section 12.6: the fold takes no time that grows with commits times objects, nor does it recurse."""
    maker = LogMaker()
    maker.claim()
    base = tuple(pack(0, ("base", i)) for i in range(50))
    previous: tuple[ObjectRef, ...] = ()
    commits = []
    for i in range(3000):
        mine = (pack(0, i),)
        commits.append(
            maker.commit(objects_added=base + mine if i == 0 else mine, objects_dropped=previous).seq
        )
        previous = mine
    maker.retire(*commits[:-2])
    uses = object_uses(maker.history)
    assert all(uses[ref.key].live for ref in base)
    live = [i for i in range(3000) if uses[pack(0, i).key].live]
    assert live == [2998, 2999]
    assert uses[pack(0, 0).key] == ObjectUse(1000, False, 3001)
    assert object_uses(History()) == {}


def test_dropped_in_every_branch() -> None:
    """Section 12.6: what all children drop is used by their parent alone."""
    maker = LogMaker()
    claim = maker.claim().seq
    ref = pack(claim, "x")
    parent = maker.commit(objects_added=(ref,)).seq
    for name in ("a", "b", "c"):
        maker.fork(name, parent)
        maker.claim(name)
        maker.commit(name, objects_dropped=(ref,))
    maker.commit(objects_dropped=(ref,))
    assert object_uses(maker.history)[ref.key].live
    retire = maker.retire(parent).seq
    assert object_uses(maker.history)[ref.key] == ObjectUse(1000, False, retire)


def test_an_object_that_is_only_dropped() -> None:
    """Section 12.6: it is named, used by nobody, and retired by nobody."""
    maker = LogMaker()
    maker.claim()
    ref = ObjectRef(pack_key(0, sha("x")), 5)
    maker.commit(objects_dropped=(ref,))
    assert object_uses(maker.history)[ref.key] == ObjectUse(5, False, None)
