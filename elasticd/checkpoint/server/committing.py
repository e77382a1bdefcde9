"""Commit a checkpoint: once the shards are durable, write the manifest, and once the manifest is durable, the
pointer."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import msgspec

from elasticd.checkpoint.format.manifest import (
    MANIFEST,
    METADATA,
    BadCheckpoint,
    File,
    digest,
    encode,
    shard_name,
)
from elasticd.checkpoint.newest.pointer import POINTER, Committer, FilePointer
from elasticd.checkpoint.newest.retention import Commit, CommitRefused
from elasticd.checkpoint.server.shards import PendingSave, SavingWorld
from elasticd.checkpoint.storage import CheckpointStore, error_text
from elasticd.checkpoint.storage.reading import is_finished
from elasticd.core.checkpoint_names import age_of, parse_folder
from elasticd.core.facts import Saved

_RECEIPT: Final = ".receipt"
_READERS: Final = 16
_OTHERS_S: Final = 600.0  # how long to wait for the next shard of another node
_ALONE_S: Final = 30.0  # how long to wait once all workers of the world on this node have left
_UNREADABLE_S: Final = 60.0  # how long the store may fail to list the folder, or to give a receipt


class _Receipt(msgspec.Struct, frozen=True):
    """A file that the saver of another node writes beside its shards for the saver that commits. It holds the
    files by rank, or the reason why their shards will never come."""

    files: dict[int, File] = {}
    why: str = ""


_RECEIPTS: Final = msgspec.json.Decoder(_Receipt)


class Committing:
    """Commits checkpoints whose shards are written. All methods block and must be called from threads.
    ``committer_of`` returns the committer of a store."""

    def __init__(
        self,
        committer_of: Callable[[CheckpointStore], Committer],
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._committer_of = committer_of
        self._committers: dict[str, Committer] = {}
        self._say = say
        self._begun: set[str] = set()  # URLs of stores whose pointer file exists
        # By URL, the last commits after which older checkpoints are not removed yet.
        self._unswept: dict[str, tuple[CheckpointStore, Commit]] = {}

    def close(self) -> list[tuple[Saved, str]]:
        """Stop committing. Return the committed checkpoints that the pointer file does not name, each with
        the reason: a later run will not find them."""
        unrecorded = self._sweep_again()
        for committer in self._committers.values():
            committer.close()
        return unrecorded

    def committer(self, store: CheckpointStore) -> Committer:
        return self._committers.get(store.url) or self._committers.setdefault(
            store.url, self._committer_of(store)
        )

    def hand_in(self, world: SavingWorld, save: PendingSave) -> None:
        """Write the receipt that tells the committing saver that all shards of this node are written. Raises
        OSError."""
        world.store.replace(_receipt(world, save), msgspec.json.encode(_Receipt(save.files)))

    def commit(self, world: SavingWorld, save: PendingSave) -> Saved:
        """Commit the checkpoint, once all shards of this node are written. Raises ``CommitRefused``,
        BadCheckpoint, TimeoutError or OSError if the checkpoint is not committed. After an OSError with
        ``save.tried`` set, the checkpoint may be committed nevertheless."""
        store, name = world.store, save.name
        described = save.layout.metadata  # made the first time, while other nodes may still write
        files = save.files | self._elsewhere(world, save)
        metadata = store.write(f"{name}/{METADATA}", memoryview(described))
        listed = [*(files[rank] for rank in sorted(files)), metadata]
        manifest = encode(name, save.step, world.round, world.size, save.at, listed, save.layout.index)
        store.sync(name)
        if store.url not in self._begun:
            FilePointer(store).begin()
            self._begun.add(store.url)
        store.write(f"{name}/{MANIFEST}", memoryview(manifest))
        store.sync(name)
        size = sum(f.size for f in listed) + len(manifest)
        saved = Saved(name, save.step, world.round, world.size, save.at, size, digest(manifest))
        in_time = save.witness is not None and save.witness.result()
        committer = self.committer(store)
        save.tried = True
        try:
            made = committer.commit(saved, world.keep, world.fence, in_time=in_time)
        except (CommitRefused, BadCheckpoint):
            save.tried = False
            raise
        self._sweep(store, made)
        return saved

    def refuse(self, world: SavingWorld, save: PendingSave) -> None:
        """Tell the committing saver not to wait for this node."""
        # The committing saver then waits for a later receipt or for its timeout.
        with contextlib.suppress(OSError):
            world.store.replace(_receipt(world, save), msgspec.json.encode(_Receipt(why=save.why)))

    def discard(self, world: SavingWorld, save: PendingSave) -> None:
        """Remove the files of a failed checkpoint, and retry removals that failed before, since the disk may
        be full."""
        world.store.remove(save.name)
        self._sweep_again()

    def _elsewhere(self, world: SavingWorld, save: PendingSave) -> dict[int, File]:
        """Wait for the receipts of the other nodes, and return their files by rank. The folder is listed,
        because there may be many nodes."""
        files: dict[int, File] = {}
        missing = set(range(world.size)) - save.files.keys()
        read: set[str] = set()
        alone_since: float | None = None
        read_at = heard_at = time.monotonic()  # this node has just written its own shards
        while missing:
            later = [g for g in list(world.pending.values()) if g.step > save.step]
            try:
                # List later checkpoints first. A node that has written a receipt there will write none here.
                ahead = {receipt: g.step for g in later for receipt in _receipts(world.store, g.name)}
                there = _receipts(world.store, save.name)
                fresh = _read(world.store, [f"{save.name}/{receipt}" for receipt in sorted(there - read)])
            except OSError:
                if time.monotonic() > read_at + _UNREADABLE_S:
                    raise
                time.sleep(world.store.poll_s)
                continue
            read_at = time.monotonic()
            if fresh:
                for said in fresh:
                    if said.why:
                        raise TimeoutError(said.why)
                    if any(file.name != shard_name(rank) for rank, file in said.files.items()):
                        raise TimeoutError("the receipt of another node names files that are not its shards")
                    files |= said.files
                read |= there
                missing -= files.keys()
                heard_at = time.monotonic()
                continue
            first = min(missing)
            # Nodes write receipts in order of step, so a missing receipt will never come.
            if lost := ahead.keys() - there:
                step = ahead[min(lost)]
                raise TimeoutError(
                    f"the shard of rank {first}, which is on another node, never arrived, but step {step} did"
                )
            now = time.monotonic()
            alone_since = None if world.lines else alone_since or now
            if now > (heard_at + _OTHERS_S if alone_since is None else alone_since + _ALONE_S):
                raise TimeoutError(f"the shard of rank {first}, which is on another node, never arrived")
            time.sleep(world.store.poll_s)
        world.store.unlink(f"{save.name}/{receipt}" for receipt in read)
        return files

    def _sweep(self, store: CheckpointStore, made: Commit) -> None:
        """Remove the checkpoints that retention drops, and unfinished folders that can no longer be
        committed. A finished checkpoint with a later step than the newest one stays: it may be the only copy
        of that work. A failure here does not affect the commit; the next sweep tries again."""
        newest = made.checkpoint.newest
        if newest is None:
            return
        self._unswept[store.url] = (store, made)
        if made.unsettled:
            self._say(
                f"step {newest.step} is committed, but {POINTER} does not name it yet: {made.unsettled}"
            )
            return
        try:
            names = store.names()
            committed = {s.name for s in made.checkpoint.saved}
            for name in names:
                there = parse_folder(name)
                if there is None or name in committed:
                    continue
                # ``retention.commit`` would refuse an older checkpoint that is still being written.
                older = there.age <= age_of(newest.name)
                if older and (there.step <= newest.step or not is_finished(store, name)):
                    store.remove(name)
            FilePointer(store).clear(names)
        except OSError as error:
            self._say(
                f"step {newest.step} is committed, but older ones are not removed yet: {error_text(error)}"
            )
        else:
            self._unswept.pop(store.url, None)

    def _sweep_again(self) -> list[tuple[Saved, str]]:
        """Settle and sweep again where an earlier sweep failed. Return the checkpoints that are still not
        settled, as ``close`` does."""
        unrecorded = []
        for store, made in list(self._unswept.values()):
            try:
                known = self.committer(store).settle()
            except (CommitRefused, BadCheckpoint, OSError) as error:
                if made.unsettled and made.checkpoint.newest is not None:
                    unrecorded.append((made.checkpoint.newest, error_text(error)))
            else:
                self._sweep(store, Commit(known))
        return unrecorded


def _receipt(world: SavingWorld, save: PendingSave) -> str:
    """Return the path of this node's receipt."""
    return f"{save.name}/{shard_name(min(world.locals))}{_RECEIPT}"


def _receipts(store: CheckpointStore, folder: str) -> set[str]:
    """Return the names of the receipts in the folder."""
    try:
        return {name for name in store.files(folder) if name.endswith(_RECEIPT)}
    except FileNotFoundError:
        return set()


def _read(store: CheckpointStore, receipts: Sequence[str]) -> list[_Receipt]:
    """Return what the receipts say. They are read in parallel, because there may be many, and the store may
    be slow. Raises OSError."""
    if not receipts:
        return []
    with ThreadPoolExecutor(min(_READERS, len(receipts)), "receipts") as pool:
        return [_RECEIPTS.decode(raw) for raw in pool.map(store.read, receipts)]
