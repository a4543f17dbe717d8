"""Changes a store in a `DictStorage` as an adversary would: every hash and every link in order, one thing
wrong.
"""

import hashlib
import json

import pyarrow as pa
import zstandard
from mapmaker import arrow_file, frame

from deltaformat.keys import manifest_key, pack_key, record_key

__all__ = [
    "add_pack",
    "append",
    "decompressed",
    "last_commit",
    "members_of",
    "replace_content",
    "replace_manifest",
    "rewrite",
    "rewrite_manifest",
    "sealed",
]


def sealed(members):
    """An object that ends with `check`, by DF-JSN-03; `members` may also be the JSON text without it."""
    if isinstance(members, dict):
        members = {name: value for name, value in members.items() if name != "check"}
        members = json.dumps(members, ensure_ascii=False, separators=(",", ":")).encode()
    body = members.removesuffix(b"}")
    return body + b',"check":"' + hashlib.sha256(body).hexdigest().encode() + b'"}'


def members_of(storage, seq):
    return json.loads(storage.objects[record_key(seq)])


def last_commit(storage):
    seqs = [int(key[4:24]) for key in storage.objects if key.startswith("log/")]
    return max(seq for seq in seqs if members_of(storage, seq)["kind"] == "commit")


def rewrite(storage, seq, change):
    """Let `change` alter record `seq` (its members, or what it returns: members or text), and link those
    after it anew.
    """
    members = members_of(storage, seq)
    changed = change(members)
    storage.objects[record_key(seq)] = sealed(members if changed is None else changed)
    while record_key(seq + 1) in storage.objects:
        prev = hashlib.sha256(storage.objects[record_key(seq)]).hexdigest()
        seq += 1
        storage.objects[record_key(seq)] = sealed(members_of(storage, seq) | {"prev": prev})


def append(storage, **members):
    """Add a record to the log: what the newest one has, but for `members`. Returns its number."""
    seq = max(int(key[4:24]) for key in storage.objects if key.startswith("log/"))
    newest = members_of(storage, seq)
    common = {name: newest[name] for name in ("time", "heads", "last_tag", "last_retire", "requires")}
    for kind, link in (("tag", "last_tag"), ("retire", "last_retire")):
        if newest["kind"] == kind:
            common[link] = seq
    prev = hashlib.sha256(storage.objects[record_key(seq)]).hexdigest()
    record = {"kind": "?", "seq": seq + 1, "prev": prev, "nonce": f"{seq:032}", **common, **members}
    storage.objects[record_key(seq + 1)] = sealed(record)
    return seq + 1


def decompressed(storage, seq):
    """The Arrow file of commit `seq`'s only manifest."""
    (ref,) = members_of(storage, seq)["manifests"]
    return zstandard.ZstdDecompressor().decompress(storage.objects[ref["key"]])


def replace_manifest(storage, seq, data, content_size, **members):
    """Give commit `seq` another manifest object."""
    claim = members_of(storage, seq)["claim"]
    key = manifest_key(claim, hashlib.sha256(data).hexdigest())
    storage.objects[key] = data
    ref = {"key": key, "size": len(data), "content_size": content_size}
    rewrite(storage, seq, lambda record: record.update(manifests=[ref], **members))


def replace_content(storage, seq, content, **members):
    """Give commit `seq` another Arrow file."""
    replace_manifest(storage, seq, frame(content), len(content), **members)


def rewrite_manifest(storage, seq, change, extra=(), **members):
    """Let `change` alter columns (name -> list of Python values; an Arrow array is taken as it is) and
    metadata.
    """
    table = pa.ipc.open_file(pa.BufferReader(decompressed(storage, seq))).read_all()
    metadata = json.loads(table.schema.metadata[b"deltaformat"])
    columns = {name: table.column(name).to_pylist() for name in table.column_names}
    change(columns, metadata)
    arrays = {
        name: values if isinstance(values, pa.Array) else pa.array(values, table.schema.field(name).type)
        for name, values in columns.items()
    }
    replace_content(storage, seq, arrow_file(arrays, metadata, extra=extra), **members)


def add_pack(storage, data, claim=0):
    """Store bytes as a pack and return its entry for a pack table."""
    key = pack_key(claim, hashlib.sha256(data).hexdigest())
    storage.objects[key] = data
    return {"key": key, "size": len(data)}
