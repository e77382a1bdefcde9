"""``elasticd ckpt``: lists, verifies, exports and removes checkpoints."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from elasticd.checkpoint.format.manifest import MANIFEST, BadCheckpoint, Manifest
from elasticd.checkpoint.newest.pointer import FilePointer
from elasticd.checkpoint.storage import BadStore, CheckpointStore, disk, reading, store_at
from elasticd.checkpoint.storage.disk import Disk
from elasticd.cli.command_error import CommandError
from elasticd.cli.say import say, table
from elasticd.core.checkpoint_names import parse_folder
from elasticd.core.facts import Checkpoint, Saved
from elasticd.telemetry import describe

NOT_WHOLE = 5


def _opened(ctx: click.Context, param: click.Parameter, value: str) -> CheckpointStore:
    """Return the store for an existing folder or an address."""
    if not value:
        raise click.BadParameter("the name is empty.", ctx, param)
    try:
        store = store_at(value)
    except BadStore as error:
        raise click.BadParameter(f"{error}.", ctx, param) from error
    if isinstance(store, Disk) and not store.path.is_dir():
        raise click.BadParameter(f"Directory '{value}' does not exist.", ctx, param)
    return store


_folder = click.argument("store", metavar="FOLDER", callback=_opened)
_which = click.argument("which", required=False, metavar="[STEP|NAME]")
_json = click.option("--json", "as_json", is_flag=True, help="One JSON object per checkpoint.")


@click.group()
def ckpt() -> None:
    """List, show, verify, export and remove checkpoints.

    FOLDER is where a job's checkpoints are: a path, or an address such as s3://bucket/run1.
    Without STEP or NAME: the newest checkpoint.
    """


@dataclass(frozen=True, slots=True)
class _Inspected:
    """A committed checkpoint, and the result of a check of its manifest and file sizes."""

    saved: Saved
    manifest: Manifest | None
    wrong: str

    def as_json(self) -> dict[str, Any]:
        return {
            **_facts(self.saved),
            "at": self.saved.at,
            "whole": not self.wrong,
            "wrong": self.wrong or None,
        }


def _facts(saved: Saved) -> dict[str, Any]:
    """Return what `ls` and `show` have of a checkpoint in common."""
    return {
        "name": saved.name,
        "step": saved.step,
        "generation": saved.round,
        "world": saved.world,
        "size": saved.size,
    }


@ckpt.command()
@_folder
@_json
def ls(store: CheckpointStore, as_json: bool) -> None:
    """List the committed checkpoints, oldest first.

    WHOLE: no file is missing or short; `verify` reads every byte. GENERATION: the number of the world that
    saved, counted over all jobs that save in FOLDER; not a round.
    """
    known = _known(store)
    looked = [_inspect(store, saved) for saved in known.saved]
    if as_json:
        for one in looked:
            say(json.dumps(one.as_json()))
        return
    if looked:
        say(*table([("STEP", "AGE", "WORLD", "GENERATION", "SIZE", "WHOLE", "NAME"), *map(_row, looked)]))
    else:
        say(f"There is no committed checkpoint in {store.url}.", err=True)
    for one in looked:
        if one.wrong:
            say(f"elasticd: {one.wrong}.", err=True)
    committed = {saved.name for saved in known.saved}
    begun = sum(1 for name in _names(store) if parse_folder(name) and name not in committed)
    if begun:
        say(
            f"elasticd: {describe.count(begun, 'folder')} not committed (being saved, or left over).",
            err=True,
        )


@ckpt.command()
@_folder
@_which
@_json
def show(store: CheckpointStore, which: str | None, as_json: bool) -> None:
    """Show what a checkpoint holds: its shards, tensors and objects."""
    saved, manifest = _whole(store, which)
    index = manifest.index
    files = {**{f.name: f.size for f in manifest.files}, MANIFEST: saved.size - manifest.size}
    if as_json:
        tensors = {k: {"dtype": t.dtype, "shape": t.shape} for k, t in index.tensors.items()}
        held = {"files": files, "tensors": tensors, "objects": sorted(index.blobs)}
        say(json.dumps({**_facts(saved), **held}))
        return
    saved_by = f"{describe.count(manifest.world, 'worker')} (generation {manifest.round})"
    say(f"{manifest.name}: step {manifest.step}, saved by {saved_by}, {describe.size(saved.size)}")
    for name, size in files.items():
        say(f"  {name:<24} {describe.size(size):>10}")
    say(f"{describe.count(len(index.tensors), 'tensor')}:")
    for key, tensor in sorted(index.tensors.items()):
        parts = f", in {len(tensor.chunks)} parts" if len(tensor.chunks) > 1 else ""
        say(f"  {key}  {tensor.dtype} {list(tensor.shape)}{parts}")
    say(f"{describe.count(len(index.blobs), 'object')}:")
    for key in sorted(index.blobs):
        say(f"  {key}")


@ckpt.command()
@_folder
@_which
@click.option("--all", "every", is_flag=True, help="Verify all committed checkpoints.")
def verify(store: CheckpointStore, which: str | None, every: bool) -> int:
    """Read every byte of a checkpoint and compare it with its checksums.

    Exit code 5: something is damaged; the output names the damaged files.
    """
    if every and which is not None:
        raise CommandError("give a checkpoint or --all, not both")
    damaged = 0
    known = _known(store)
    for saved in known.saved if every else (_find(known, which),):
        looked = _inspect(store, saved)
        wrong = [looked.wrong] if looked.wrong else []
        if looked.manifest is not None:
            with _bar(f"step {saved.step}", looked.manifest.size) as advance:
                for _, faults in reading.verify(store, looked.manifest, advance):
                    wrong += faults
        for sentence in wrong:
            say(f"elasticd: {sentence}.", err=True)
        say(f"{saved.name}: {'damaged' if wrong else 'whole'}")
        damaged += bool(wrong)
    return NOT_WHOLE if damaged else 0


@ckpt.command()
@_folder
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path))
@_which
@click.option("--only", multiple=True, metavar="NAME", help="Only this part of the state, such as model.")
def export(store: CheckpointStore, out: Path, which: str | None, only: tuple[str, ...]) -> None:
    """Write a checkpoint into one .safetensors or .pt file.

    Every byte that is read is verified. A safetensors file holds the tensors only; a .pt file, for
    torch.load, holds the whole state as a nested dict.
    """
    if out.suffix not in (".safetensors", ".pt", ".pth"):
        raise CommandError(f"the file name {out.name} must end in .safetensors or .pt")
    _, manifest = _whole(store, which)
    names = {str(path[0]) for path in manifest.index.paths.values()}
    unknown = [name for name in only if name not in names]
    if unknown:
        raise CommandError(
            f"{manifest.name} has no part {unknown[0]}; it has {describe.listing(sorted(names))}"
        )
    import torch

    from elasticd.checkpoint.client.load_plan import Target
    from elasticd.checkpoint.client.state_dict import restore

    state: dict[str, Any] = dict.fromkeys(sorted(only or names))
    fresh = out.with_name(f".{out.name}.new")
    try:
        target = Target.of(manifest.name, state, manifest.index)
        with _bar("reading", sum(len(w.into) for w in target.ranges)) as advance:
            reading.fill(store, manifest, target.ranges, progress=advance)
        flat = target.finish()
        if out.suffix == ".safetensors":
            _save_safetensors(flat.tensors, fresh, manifest)
        else:
            restore(state, flat)
            torch.save(state, fresh)
        disk.settle(fresh, out)
    except BadCheckpoint as error:
        raise CommandError(f"{error}", NOT_WHOLE) from error
    except OSError as error:
        raise CommandError(f"{out} cannot be written: {error.strerror}") from error
    finally:
        fresh.unlink(missing_ok=True)
    say(f"{out}: step {manifest.step}, {describe.count(len(flat.tensors), 'tensor')}")


@ckpt.command()
@_folder
@click.argument("which", metavar="STEP|NAME")
@click.option("--force", is_flag=True, help="Remove even the checkpoint that a job would resume from.")
def rm(store: CheckpointStore, which: str, force: bool) -> None:
    """Remove a checkpoint.

    The newest whole checkpoint is removed with --force only, because a job may resume from it. A running job
    that saved the checkpoint reports it as missing until the job would have removed it.
    """
    known = _known(store)
    saved = _find(known, which)
    if not force and saved == next((s for s in reversed(known.saved) if not _inspect(store, s).wrong), None):
        raise CommandError(
            f"step {saved.step} is the newest whole checkpoint, from which a job that runs or is started "
            "again resumes; give --force to remove it nevertheless"
        )
    try:
        FilePointer(store).forget(saved.name)
        store.remove(saved.name)
    except OSError as error:
        raise CommandError(f"{error.filename or store.url} cannot be changed: {error.strerror}") from error
    say(f"{saved.name}: removed")


# ---------------------------------------------------------------- reading


def _known(store: CheckpointStore) -> Checkpoint:
    try:
        return FilePointer(store, lambda said: say(f"elasticd: {said}.", err=True)).read()
    except BadCheckpoint as error:
        raise CommandError(f"{error}", NOT_WHOLE) from error
    except OSError as error:
        raise _unreadable(store, error) from error


def _names(store: CheckpointStore) -> Sequence[str]:
    try:
        return store.names()
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise _unreadable(store, error) from error


def _unreadable(store: CheckpointStore, error: OSError) -> CommandError:
    return CommandError(f"{error.filename or store.url} cannot be read: {error.strerror}")


def _find(known: Checkpoint, which: str | None) -> Saved:
    saved = known.saved
    if not saved:
        raise CommandError(f"there is no committed checkpoint in {known.path}", NOT_WHOLE)
    if which is None:
        return saved[-1]
    for one in reversed(saved):
        if which in (one.name, str(one.step)):
            return one
    steps = describe.listing([str(s.step) for s in saved], most=10)
    raise CommandError(
        f"there is no checkpoint {which} in {known.path}; there are checkpoints of steps {steps}"
    )


def _inspect(store: CheckpointStore, saved: Saved) -> _Inspected:
    try:
        return _Inspected(saved, reading.open_manifest(store, saved), "")
    except BadCheckpoint as error:
        return _Inspected(saved, None, str(error))


def _whole(store: CheckpointStore, which: str | None) -> tuple[Saved, Manifest]:
    looked = _inspect(store, _find(_known(store), which))
    if looked.manifest is None:
        raise CommandError(looked.wrong, NOT_WHOLE)
    return looked.saved, looked.manifest


def _row(one: _Inspected) -> tuple[str, ...]:
    s = one.saved
    age = describe.span(max(0.0, time.time() - s.at))
    whole = "no" if one.wrong else "yes"
    return str(s.step), age, str(s.world), str(s.round), describe.size(s.size), whole, s.name


@contextmanager
def _bar(label: str, size: int) -> Iterator[Callable[[int], None]]:
    """Show progress in bytes, on a terminal only."""
    with click.progressbar(length=size, label=label, file=sys.stderr) as bar:
        yield bar.update


def _save_safetensors(tensors: dict[str, Any], out: Path, manifest: Manifest) -> None:
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise CommandError(
            "safetensors is not installed: pip install 'elasticd[safetensors]', or export a .pt file"
        ) from error
    save_file(tensors, out, metadata={"step": str(manifest.step), "name": manifest.name})
