"""Commit a checkpoint that is in memory: write the shards, then the manifest, then the pointer. Each is
durable before the next is written."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Protocol

import msgspec

from elasticd.checkpoint.commit.pointer import POINTER, FilePointer
from elasticd.checkpoint.commit.retention import Commit, CommitRefused, Keep
from elasticd.checkpoint.format.manifest import (
    MANIFEST,
    METADATA,
    BadCheckpoint,
    File,
    digest,
    encode,
    shard_name,
)
from elasticd.checkpoint.protocol import Memory
from elasticd.checkpoint.server.shards import Gathering, SavingWorld
from elasticd.checkpoint.store import CheckpointStore, told
from elasticd.checkpoint.store.rate_limit import RateLimit
from elasticd.checkpoint.store.reading import is_finished
from elasticd.core.facts import Checkpoint, Saved
from elasticd.core.naming import parse_folder

_RECEIPT: Final = ".receipt"
_READERS: Final = 16
_OTHERS_S: Final = 600.0  # how long to wait for the shards of other nodes
_ALONE_S: Final = 30.0  # the same, once this node's workers of that world are gone


class Committer(Protocol):
    """Makes a durable checkpoint the newest. ``FilePointer`` implements this protocol."""

    def known(self, *, own: bool = False) -> Checkpoint:
        """Return the committed checkpoints; with ``own``, only those of this job. Raises BadCheckpoint,
        OSError."""

    def witness(self, fence: int) -> bool:
        """Return whether the job is still in the round ``fence``. Blocks until the answer is known, or can no
        longer be known."""

    def commit(self, new: Saved, keep: Keep, fence: int, *, in_time: bool = False) -> Commit:
        """Make ``new`` the newest checkpoint. ``in_time``: the workers handed it over before the round after
        ``fence`` began. After ``CommitRefused`` or BadCheckpoint the checkpoint is not committed and never
        will be; after OSError the outcome is unknown."""

    def settle(self) -> Checkpoint:
        """Return the committed checkpoints once every reader sees them. It finishes a commit that ``commit``
        returned as unsettled, and raises the same errors."""

    def close(self) -> None: ...


class _Receipt(msgspec.Struct, frozen=True):
    """A file that the saver of another node writes beside its shards for the saver that commits. It holds the
    files by rank, or the reason why their shards will never come."""

    files: dict[int, File] = {}
    why: str = ""


_RECEIPTS: Final = msgspec.json.Decoder(_Receipt)


class Committing:
    """Writes and commits checkpoints. All methods block and must be called from threads. ``committer_of``
    returns the committer of a store."""

    def __init__(
        self,
        committer_of: Callable[[CheckpointStore], Committer],
        pace: RateLimit | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._committer_of = committer_of
        self._committers: dict[str, Committer] = {}
        self._pace = pace
        self._say = say
        self._begun: set[str] = set()  # URLs of stores whose pointer file exists
        self._unswept: dict[
            str, tuple[CheckpointStore, Commit]
        ] = {}  # by URL: older checkpoints are not removed yet

    def close(self) -> list[tuple[Saved, str]]:
        """Stop committing. Return the committed checkpoints that the pointer file does not name, each with
        the reason: a later run will not find them."""
        untold = self._sweep_again()
        for committer in self._committers.values():
            committer.close()
        return untold

    def _committer(self, store: CheckpointStore) -> Committer:
        return self._committers.get(store.url) or self._committers.setdefault(
            store.url, self._committer_of(store)
        )

    def known(self, store: CheckpointStore, own: bool) -> Checkpoint:
        return self._committer(store).known(own=own)

    def open(self, world: SavingWorld) -> None:
        """Prepare the committer of the world's store, so that the first commit need not wait."""
        self._committer(world.store).witness(world.fence)

    def witness(self, world: SavingWorld) -> bool:
        """Return whether the world's round is still the job's round. Must be called when a checkpoint is
        handed over: a checkpoint that was handed over before the next round began counts, however long its
        write takes and even if its workers are gone. A checkpoint that was handed over later does not."""
        return self._committer(world.store).witness(world.fence)

    def write(self, world: SavingWorld, name: str, rank: int, memory: Memory) -> File:
        """Write one rank's shard of the checkpoint ``name``. Raises OSError."""
        return world.store.write(f"{name}/{shard_name(rank)}", memory.view, self._pace)

    def hand_in(self, world: SavingWorld, gathering: Gathering) -> None:
        """Write the receipt that tells the committing saver that all shards of this node are written. Raises
        OSError."""
        world.store.replace(_receipt(world, gathering), msgspec.json.encode(_Receipt(gathering.files)))

    def commit(self, world: SavingWorld, gathering: Gathering) -> Saved:
        """Commit the checkpoint, once all shards of this node are written. Raises ``CommitRefused``,
        BadCheckpoint, TimeoutError or OSError. The checkpoint is then not committed, except that after an
        OSError with ``gathering.tried`` set it may be."""
        store, name = world.store, gathering.name
        files = gathering.files | self._elsewhere(world, gathering)
        metadata = store.write(f"{name}/{METADATA}", memoryview(gathering.paper.metadata))
        listed = [*(files[rank] for rank in sorted(files)), metadata]
        manifest = encode(
            name,
            gathering.step,
            world.round,
            world.size,
            gathering.at,
            listed,
            gathering.paper.index,
        )
        store.sync(name)
        if store.url not in self._begun:
            FilePointer(store).begin()
            self._begun.add(store.url)
        store.write(f"{name}/{MANIFEST}", memoryview(manifest))
        store.sync(name)
        size = sum(f.size for f in listed) + len(manifest)
        saved = Saved(name, gathering.step, world.round, world.size, gathering.at, size, digest(manifest))
        in_time = gathering.witness is not None and gathering.witness.result()
        committer = self._committer(store)
        gathering.tried = True
        try:
            made = committer.commit(saved, world.keep, world.fence, in_time=in_time)
        except (CommitRefused, BadCheckpoint):
            gathering.tried = False
            raise
        self._sweep(store, made)
        return saved

    def refuse(self, world: SavingWorld, gathering: Gathering) -> None:
        """Tell the committing saver not to wait for this node."""
        with contextlib.suppress(OSError):  # that saver then waits for a later receipt or its timeout
            world.store.replace(_receipt(world, gathering), msgspec.json.encode(_Receipt(why=gathering.why)))

    def discard(self, world: SavingWorld, gathering: Gathering) -> None:
        """Remove the files of a failed checkpoint, and retry removals that failed before: the disk may have
        been full."""
        world.store.remove(gathering.name)
        self._sweep_again()

    def _elsewhere(self, world: SavingWorld, gathering: Gathering) -> dict[int, File]:
        """Wait for the receipts of the other nodes, and return their files by rank. The folder is listed, and
        receipts are read in parallel, because there may be many nodes and the store may be slow."""
        files: dict[int, File] = {}
        missing = set(range(world.size)) - gathering.files.keys()
        read: set[str] = set()
        alone_since: float | None = None
        while missing:
            later = [g for g in list(world.gatherings.values()) if g.step > gathering.step]
            # List later checkpoints first: a node that has a receipt there has none to come here.
            ahead = {receipt: g.step for g in later for receipt in _receipts(world.store, g.name)}
            there = _receipts(world.store, gathering.name)
            if fresh := sorted(there - read):
                with ThreadPoolExecutor(min(_READERS, len(fresh)), "receipts") as pool:
                    paths = [f"{gathering.name}/{receipt}" for receipt in fresh]
                    for raw in pool.map(world.store.read, paths):
                        said = _RECEIPTS.decode(raw)
                        if said.why:
                            raise TimeoutError(said.why)
                        if any(file.name != shard_name(rank) for rank, file in said.files.items()):
                            raise TimeoutError("what another node says of its shards names other files")
                        files |= said.files
                read |= there
                missing -= files.keys()
                continue
            first = min(missing)
            if lost := ahead.keys() - there:  # each node writes its receipts in order of step
                step = ahead[min(lost)]
                raise TimeoutError(
                    f"the shard of rank {first}, which is on another node, never came, and step {step} has"
                )
            now = time.monotonic()
            alone_since = None if world.lines else alone_since or now
            waited_s = _OTHERS_S if alone_since is None else alone_since + _ALONE_S - gathering.began
            if now > gathering.began + waited_s:
                raise TimeoutError(f"the shard of rank {first}, which is on another node, never came")
            time.sleep(world.store.look_s)
        world.store.unlink(f"{gathering.name}/{receipt}" for receipt in read)
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
            self._say(f"step {newest.step} is committed, but {POINTER} does not say so yet: {made.unsettled}")
            return
        try:
            names = store.names()
            committed = {s.name for s in made.checkpoint.saved}
            for name in names:
                there = parse_folder(name)
                if there is None or name in committed:
                    continue
                # ``retention.commit`` would refuse a checkpoint that is still being written there.
                older = (there.round, there.step) <= (newest.round, newest.step)
                if older and (there.step <= newest.step or not is_finished(store, name)):
                    store.remove(name)
            FilePointer(store).clear(names)
        except OSError as error:
            self._say(f"step {newest.step} is committed, and older ones stay for now: {told(error)}")
        else:
            self._unswept.pop(store.url, None)

    def _sweep_again(self) -> list[tuple[Saved, str]]:
        """Settle and sweep the stores where that failed before. Return what ``close`` returns."""
        untold = []
        for store, made in list(self._unswept.values()):
            try:
                known = self._committer(store).settle()
            except (CommitRefused, BadCheckpoint, OSError) as error:
                if made.unsettled and made.checkpoint.newest is not None:
                    untold.append((made.checkpoint.newest, told(error)))
            else:
                self._sweep(store, Commit(known))
        return untold


def _receipt(world: SavingWorld, gathering: Gathering) -> str:
    """Return the path of this node's receipt."""
    return f"{gathering.name}/{shard_name(min(world.locals))}{_RECEIPT}"


def _receipts(store: CheckpointStore, folder: str) -> set[str]:
    """Return the names of the receipts in the folder."""
    try:
        return {name for name in store.sizes(folder) if name.endswith(_RECEIPT)}
    except FileNotFoundError:
        return set()
