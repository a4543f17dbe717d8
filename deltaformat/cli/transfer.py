"""Commands that move checkpoints in and out: import and export."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import deltaformat as df
from deltaformat.batches import batches, read_many
from deltaformat.checkpoint import Checkpoint, open_checkpoint
from deltaformat.cli.options import (
    Commands,
    UsageError,
    add_allow_external,
    add_branch,
    add_step,
    byte_size,
    natural,
)
from deltaformat.cli.output import Console, human, plain
from deltaformat.errors import ErrorCode, InconsistentError
from deltaformat.export import MAX_SHARD_BYTES, write_checkpoint
from deltaformat.hubmodel import fetch_model, is_model_url
from deltaformat.stager import Progress
from deltaformat.tensors import HostTensor, TensorSpec

__all__ = ["register_export", "register_import"]


def register_import(commands: Commands) -> None:
    """Declare `import`."""
    parser = commands.add(
        "import",
        _import,
        help="commit a safetensors file or a Hugging Face checkpoint directory as a step",
        example="deltaformat import run/ checkpoints/step-100 --step 100",
    )
    parser.add_argument("store", metavar="STORE")
    parser.add_argument(
        "source",
        metavar="FILE_OR_DIR",
        help="a safetensors file (sidecar files stay those of the step before), a whole directory, or a model"
        " of the Hub: hf://NAMESPACE/NAME@REVISION",
    )
    add_step(parser)
    add_branch(parser)
    parser.add_argument(
        "--external",
        action="store_true",
        help="leave the bytes where they are: the store refers to the files, which must never change",
    )
    parser.add_argument(
        "--external-url",
        metavar="URL",
        help="with --external: where readers find the directory (hf://NAMESPACE/NAME@REVISION)",
    )
    parser.add_argument(
        "--allow-set-change", action="store_true", help="names of tensors may differ from the step before"
    )
    parser.add_argument(
        "--resume-from",
        type=natural,
        metavar="N",
        help="first go back to this step; later ones stay readable by seq",
    )
    parser.add_argument(
        "--single-writer",
        action="store_true",
        help="for a store without create-if-absent: you promise that nobody else writes",
    )
    parser.add_argument("--init", action="store_true", help="make the store if it is not there")
    add_allow_external(parser)


def register_export(commands: Commands) -> None:
    """Declare `export`."""
    parser = commands.add(
        "export",
        _export,
        help="write a step as a Hugging Face checkpoint directory",
        example="deltaformat export run/ --step 100 --output step-100/",
    )
    parser.add_argument("store", metavar="STORE")
    add_step(parser)
    parser.add_argument(
        "--output", required=True, metavar="DIR", help="a directory that is not there yet, or is empty"
    )
    parser.add_argument(
        "--max-shard-size",
        type=byte_size,
        default=MAX_SHARD_BYTES,
        metavar="SIZE",
        help="begin a new file rather than go beyond (default: 5GB)",
    )
    add_branch(parser)
    add_allow_external(parser)


def _directory_url(path: Path) -> str:
    directory = path if path.is_dir() else path.parent
    return directory.resolve().as_uri()


def _check_fits(store: df.Store, checkpoint: Checkpoint, options: argparse.Namespace) -> None:
    """Refuse what the commit would refuse, before the branch is taken from whoever writes it."""
    if options.resume_from is not None:
        return
    head = store.branches().get(options.branch)
    if head is None or head.step is None:
        return
    where = f"branch {options.branch}"
    if options.step < head.step:
        raise InconsistentError(
            ErrorCode.STEP_NOT_ABOVE_HEAD,
            f"step {options.step} is below the head's, {head.step}; to go back use --resume-from",
            where=where,
        )
    if not options.allow_set_change:
        differing = set(store.version(branch=options.branch).keys()) ^ set(checkpoint)
        if differing:
            raise InconsistentError(
                ErrorCode.SET_CHANGED,
                f"{len(differing)} tensor names differ from step {head.step} ({min(differing)!a}...);"
                " pass --allow-set-change if that is meant",
                where=where,
            )


def _import(options: argparse.Namespace, console: Console) -> int:
    if options.external_url is not None and not options.external:
        raise UsageError("--external-url goes with --external; see deltaformat import --help")
    # The input is checked first: a mistake there leaves no claim, and no empty store, behind.
    source, external_url = options.source, options.external_url
    if is_model_url(source):
        fetched = fetch_model(source)
        source, external_url = fetched.path, external_url or fetched.url
        console.say(f"fetched {plain(fetched.url)}")
        if fetched.left_out:
            console.say(f"not fetched: {', '.join(plain(name) for name in fetched.left_out)}")
    checkpoint = open_checkpoint(source)
    if options.init:
        df.create(options.store, exist_ok=True)
    allowed = list(options.allow_external)
    if options.external and not external_url:
        allowed.append(_directory_url(checkpoint.path))  # who names a directory here allows it
    store = df.open(options.store, allow_external=allowed)
    # A file is weights and no more: the sidecar files of the step before stay.
    _check_fits(store, checkpoint, options)
    files = checkpoint.sidecars() if Path(source).is_dir() else None
    with (
        console.bars() as progress,
        store.writer(
            options.branch,
            resume_from=options.resume_from,
            single_writer=options.single_writer,
            progress=progress,
        ) as writer,
    ):
        if options.external:
            part = writer.stage_external(step=options.step, checkpoint=checkpoint, base_url=external_url)
            info = writer.commit(
                step=options.step, parts=[part], files=files, allow_set_change=options.allow_set_change
            )
        else:
            info = writer.commit(
                step=options.step, tensors=checkpoint, files=files, allow_set_change=options.allow_set_change
            )
    console.say(f"note: {plain(note)}" for note in checkpoint.notes)
    if info.created:
        console.say(
            f"step {info.step} of {info.branch}: {info.tensors:,} tensors, {human(info.nbytes)}; "
            f"{human(info.bytes_written)} written, {len(files or ()):,} sidecar files, "
            f"{info.timings['total']:.2f} s"
        )
    else:
        console.say(f"step {info.step} of {info.branch} has these weights already (commit {info.seq})")
    console.say(f"root {info.root}")
    if options.external and not external_url:
        console.say(f"read it with --allow-external {_directory_url(checkpoint.path)}")
    console.document(
        {
            "store": store.url,
            "branch": info.branch,
            "step": info.step,
            "seq": info.seq,
            "root": info.root,
            "created": info.created,
            "tensors": info.tensors,
            "changed_blocks": info.changed_blocks,
            "blocks": info.blocks,
            "nbytes": info.nbytes,
            "bytes_written": info.bytes_written,
            "files": sorted(files or ()),
            "notes": list(checkpoint.notes),
            "timings": dict(info.timings),
        }
    )
    return 0


def _export(options: argparse.Namespace, console: Console) -> int:
    store = df.open(options.store, allow_external=tuple(options.allow_external))
    with store.version(options.step, branch=options.branch) as version, console.bars() as progress:
        layout = version.map
        specs = list(map(TensorSpec, layout.names, layout.dtypes, layout.shapes))
        files: dict[str, Callable[[], bytes]] = {
            path: partial(version.read_file, path) for path in version.files()
        }
        written = write_checkpoint(
            options.output,
            specs,
            _read(version),
            files,
            max_shard_bytes=options.max_shard_size,
            progress=lambda done, total: progress(Progress("export", done, total)),
        )
        nbytes = int(layout.tensor_bytes.sum())
    output = Path(options.output)
    console.say(
        [
            f"step {version.step} of {options.branch}: {len(specs):,} tensors, {human(nbytes)}, "
            f"in {len(written):,} files at {plain(str(output))}",
            f"root {version.root}",
        ]
    )
    console.document(
        {
            "store": store.url,
            "branch": options.branch,
            "step": version.step,
            "seq": version.seq,
            "root": version.root,
            "output": str(output),
            "files": list(written),
            "tensors": len(specs),
            "nbytes": nbytes,
        }
    )
    return 0


def _read(version: df.Version) -> Iterator[tuple[str, HostTensor]]:
    """The tensors in order, a bounded batch in memory at a time, verified."""
    for batch in batches(version, version.map.names):
        yield from read_many(version, batch).items()
