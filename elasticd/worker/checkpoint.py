"""Checkpoints of a training: ``save`` costs one copy of what this rank writes, and nothing else waits.

::

    checkpoints = worker.Checkpoints("/shared/run1")
    state = {"model": model, "optimizer": optimizer, "progress": {"step": 0}}
    step = checkpoints.load(state) or 0
    ...
    checkpoints.save(state, step)
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

import msgspec
import torch

from elasticd.checkpoint import handover
from elasticd.checkpoint.frames import padded_blob, room_for
from elasticd.checkpoint.handover import Gone, Line, Memory, Paper
from elasticd.checkpoint.manifest import BadCheckpoint, encode_index, folder_name
from elasticd.checkpoint.pointer import FilePointer
from elasticd.checkpoint.reading import fill, open_manifest
from elasticd.checkpoint.store import store_at
from elasticd.core.cadence import parse
from elasticd.core.facts import Checkpoint, Resume, Saved
from elasticd.core.page import Fatal
from elasticd.core.replicas import Choice, holders, newest_whole
from elasticd.core.retention import Keep
from elasticd.worker import told
from elasticd.worker.collect import Flat, flatten, restore
from elasticd.worker.layout import Held, Shard, lay_out
from elasticd.worker.recall import HolderLost, Memories, known
from elasticd.worker.schedule import Schedule
from elasticd.worker.target import Target, box, parts_of
from elasticd.worker.together import Together

_log = logging.getLogger(__name__)
_BUFFERS: Final = 2
_NOTHING_WHOLE: Final = 5  # the exit code, as the job's will be
_ROOT = str(Path(__file__).parents[2])
_PROGRAM = (
    "import sys; sys.path.append({root!r}); "
    "from elasticd.checkpoint.alone import main; main({fd}, {options!r})"
)
_savers: list[subprocess.Popen[bytes]] = []  # they outlive us; kept so that nobody complains of it


class NoCheckpoint(RuntimeError):
    """None is whole, and one was required. The message says what is wrong with each."""


@dataclass(slots=True)
class _Plan:
    """What stays the same from save to save."""

    number: int
    shape: tuple[Any, ...]  # of the state it was made for
    shard: Shard
    rooms: dict[str, int]
    buffers: list[_Buffer]
    turn: int = 0  # which of them is next; the other has the newest

    @property
    def free(self) -> bool:
        if any(buffer.copying for buffer in self.buffers):
            return False  # what would be written over may be the newest that is with everybody
        return self.turn >= len(self.buffers) or not self.buffers[self.turn].busy


@dataclass(slots=True)
class _Buffer:
    memory: Memory
    image: torch.Tensor
    into: list[torch.Tensor]
    busy: bool = False  # being read: it goes to the disk, or to another node
    copying: bool = False  # it is on its way to another node


@dataclass(frozen=True, slots=True)
class Committed:
    """``took_s``: from the handover until it was durable. ``size``: bytes of all ranks."""

    name: str
    step: int
    took_s: float
    size: int


class Checkpoints:
    """The checkpoints below a folder that all ranks can write to, made and read by all ranks together.

    ``path`` may be an address of fsspec's, such as ``s3://bucket/run1``, or be left to the agent's
    ``--checkpoints``. All ranks call ``save`` and ``load`` at the same steps, after each change of world
    anew. ``last``: keep so many of the newest; ``every``: and the first of each so many steps. ``when``:
    what ``save_if_due`` goes by, ``100`` (steps), ``90s``, ``10m``, ``1h`` or ``auto`` (by what saving
    costs and how often the job fails); else the agent's ``--checkpoint-every``, else each step.

    ``skipped`` counts saves that were left out as the disk had not caught up, ``failed`` those that
    came to nothing (``last_error`` says why), ``newest`` is what was last seen to be committed.
    ``tier``: where the last ``load`` took the state from: this node's ``memory``, also a ``peer``'s, or
    ``disk``; empty if it found none.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        last: int = 3,
        every: int = 0,
        when: str | None = None,
    ) -> None:
        where = path or os.environ.get("ELASTICD_CHECKPOINTS")
        if not where:
            raise ValueError(
                "nothing says where checkpoints are to be: give a path or run with --checkpoints"
            )
        self._store = store_at(where)
        self._schedule = Schedule(parse(when or os.environ.get("ELASTICD_CHECKPOINT_EVERY") or "1"))
        self._keep = Keep(last, every)
        self._in_step = False
        self._together: Together | None = None
        self._line: Line | None = None
        self._token = ""
        self._round = 0
        self._seq = 0
        self._plan: _Plan | None = None
        self._plans = 0
        self._copies = False
        self._blobs: dict[str, tuple[bytes, int, bytes]] = {}
        self._pending: set[str] = set()
        self.skipped = 0
        self.failed = 0
        self.last_error = ""
        self.newest: Committed | None = None
        self.tier = ""

    @property
    def from_memory(self) -> bool:
        """Whether the last ``load`` read nothing from disk."""
        return self.tier in ("memory", "peer")

    # ------------------------------------------------------------ saving

    @told.holds_up
    def save(self, state: Mapping[str, Any], step: int) -> bool:
        """Take a copy of this rank's part, to be written while training goes on. False: left out,
        since the disk has not caught up. ``step``: how many steps ``state`` has behind it.

        Raises ValueError where ranks differ in the step, TypeError for objects that could not be
        loaded again. Whatever happens to the disk raises nothing: see ``failed``.
        """
        began = time.monotonic()
        together = self._in_this_world()
        flat = flatten(state)
        self._listen()
        plan = self._plan
        shape = _shape(flat)
        blobs = self._pickled(flat.objects)
        same = plan is not None and plan.shape == shape and self._fits(plan, blobs)
        free = plan is None or not same or plan.free
        answer = together.ask_least([self._line is not None, same, free, step, -step])
        # The copy is most likely wanted, and the others' answers take their time.
        why = self._fill(flat, blobs) if self._line is not None and same and free else None
        agreed = answer()
        if agreed[3] != -agreed[4]:
            raise ValueError(
                f"rank {together.rank} saves step {step}, but others of its world save "
                f"steps {agreed[3]} to {-agreed[4]}"
            )
        if not agreed[0]:
            self._open()
        if not (agreed[0] and agreed[1]):
            self._make_plan(flat, shape, blobs)
            why = None
        elif not agreed[2]:
            self.skipped += 1
            self._say({"is": "skip", "step": step})
            return False
        self._seq += 1
        self._hand_over(self._fill(flat, blobs) if why is None else why, step, began)
        return True

    def due(self, step: int) -> bool:
        """Whether this step is to be saved, by ``when``: the same answer on all ranks, who all ask with
        each step. Raises as collectives do."""
        return self._schedule.due(step, self._in_this_world())

    def save_if_due(self, state: Mapping[str, Any], step: int) -> bool:
        """``save`` if this step is ``due``."""
        return self.due(step) and self.save(state, step)

    def keep_in_step(self) -> None:
        """Between steps only will there be saves and loads, while no rank sends anything else."""
        self._in_step = True

    @told.holds_up
    def wait(self, timeout_s: float = 600.0) -> bool:
        """Until what this rank handed over is committed or has failed, and where another node is to hold a
        copy, it has it or cannot; False after the timeout. Where the first rank is on another node: until
        what is on this node is durable."""
        deadline = time.monotonic() + timeout_s
        while (self._pending or self._copying) and self._line is not None:
            self._line.socket.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                heard = self._line.receive()
            except Gone as error:
                if time.monotonic() >= deadline:
                    return False
                self._lose(error)
                break
            finally:
                if self._line is not None:
                    self._line.socket.settimeout(None)
            if heard is not None:
                self._take(heard[0])
        return not self._pending and not self._copying

    @property
    def _copying(self) -> bool:
        return self._plan is not None and any(buffer.copying for buffer in self._plan.buffers)

    def close(self) -> None:
        """Leave; what was handed over is still written and committed."""
        if self._line is not None:
            self._line.close()
        self._line, self._plan, self._together = None, None, None

    def _committed(self, together: Together) -> tuple[Checkpoint, str]:
        """As rank 0 sees it, and what is wrong with it: all ranks go by the same."""
        found, complaint = Checkpoint(self._store.url), ""
        if together.rank == 0:
            try:
                url = self._store.url
                found, own = known(_saver(), url) or (FilePointer(self._store).read(), True)
                if not own and os.environ.get("ELASTICD_RESUME") == Resume.NEVER:
                    found = Checkpoint(url)
            except BadCheckpoint as error:
                complaint = str(error)
            except OSError as error:
                complaint = f"{error.filename or self._store.url} cannot be read: {error.strerror or error}"
        said = together.gather(msgspec.json.encode((found, complaint)))[0]
        return msgspec.json.decode(said, type=tuple[Checkpoint, str])

    def _in_this_world(self) -> Together:
        if self._together is None or self._together.over:
            self.close()
            self._together = Together(in_step=self._in_step)
            self._schedule.begin()
            self._pending.clear()
        return self._together

    def _open(self) -> None:
        """All ranks: find or start the savers, and introduce ourselves."""
        together = self._together
        assert together is not None
        self._plan = None
        self._pending.clear()
        mine: dict[str, Any] = {"host": _host(), "saver": _saver()}
        mine["node"] = os.environ.get("ELASTICD_HOLDER", "")
        if together.rank == 0:
            before = 0
            with contextlib.suppress(BadCheckpoint, OSError):  # then no commit works, which is said
                before = FilePointer(self._store).last_round()
            numbered = int(os.environ.get("ELASTICD_ROUND", "0"))
            mine |= {
                "token": os.urandom(4).hex(),
                "round": max(numbered, before + 1),
            }
        said = [json.loads(raw) for raw in together.gather(json.dumps(mine).encode())]
        self._token, self._round = said[0]["token"], said[0]["round"]
        here = (mine["host"], mine["saver"])
        locals_ = [rank for rank, its in enumerate(said) if (its["host"], its["saver"]) == here]
        keeper = holders([its["node"] for its in said]) if all(its["node"] for its in said) else {}
        saver = mine["saver"]
        starts = not saver and together.rank == locals_[0]
        if starts:
            saver = _start_saver()
        names = [raw.decode() for raw in together.gather(saver.encode())]
        self._copies = mine["node"] in keeper
        self._line = None
        try:
            line = handover.connect(names[locals_[0]])
            line.send(
                {
                    "is": "open",
                    "path": self._store.url,
                    "token": self._token,
                    "rank": together.rank,
                    "world": together.size,
                    "round": self._round,
                    "fence": int(os.environ.get("ELASTICD_ROUND", "0")),
                    "locals": locals_,
                    "holder": keeper.get(mine["node"], ""),
                    "last": self._keep.last,
                    "every": self._keep.every,
                }
            )
            self._line = line
        except Gone as error:
            self._lose(error)

    def _make_plan(self, flat: Flat, shape: tuple[Any, ...], blobs: Mapping[str, bytes]) -> None:
        """All ranks: decide who writes what, and set memory aside for it."""
        together = self._together
        assert together is not None
        for key, raw in blobs.items():
            _check_loadable(key, raw)
        rooms = {key: room_for(raw) for key, raw in blobs.items()}
        mine = Held(tuple(parts_of(flat)), rooms, flat.paths)
        said = together.gather(msgspec.json.encode(mine))
        shards, index = lay_out([msgspec.json.decode(raw, type=Held) for raw in said])
        self._plans += 1
        shard = shards[together.rank]
        self._plan = _Plan(self._plans, shape, shard, rooms, [])
        metadata = b""
        if together.rank == 0:
            from elasticd.checkpoint import metadata as dcp

            metadata = dcp.made_of(index)
        paper = Paper(encode_index(index), metadata).file()
        try:
            self._say({"is": "plan", "plan": self._plans, "size": shard.size}, paper)
        finally:
            os.close(paper)

    def _fill(self, flat: Flat, blobs: Mapping[str, bytes]) -> str:
        """Copy into the buffer whose turn it is; what prevents that, if anything does."""
        plan = self._plan
        assert plan is not None
        number = plan.turn
        try:
            if number == len(plan.buffers):
                plan.buffers.append(_make_buffer(plan.shard))
                memory = plan.buffers[number].memory
                self._say({"is": "buffer", "plan": plan.number, "buffer": number}, memory.fd)
        except OSError as error:
            return f"there is no memory for {plan.shard.size} bytes ({error.strerror})"
        buffer = plan.buffers[number]
        self._say({"is": "torn", "buffer": number})
        sources = [box(flat.tensors[part.key], part) for part, _ in plan.shard.parts]
        with torch.no_grad():
            torch._foreach_copy_(buffer.into, sources)
        for key, at, room in plan.shard.blobs:
            buffer.memory.map[at : at + room] = self._padded(key, blobs[key], room)
        return ""

    def _hand_over(self, why: str, step: int, began: float) -> None:
        """What was filled; or say ``why`` it was not."""
        plan = self._plan
        assert plan is not None
        name = folder_name(step, self._round, self._token, self._seq)
        if self._line is None:  # it went while we copied, which did not count this one yet
            self.failed += 1
            return
        self._pending.add(name)
        if why:
            self._say({"is": "miss", "name": name, "step": step, "why": why})
            return
        number = plan.turn
        plan.turn = (number + 1) % _BUFFERS
        buffer = plan.buffers[number]
        buffer.busy, buffer.copying = True, self._copies
        note = {"plan": plan.number, "buffer": number, "step": step, "name": name, "at": time.time()}
        self._schedule.cost_s = time.monotonic() - began
        self._say({"is": "save", **note, "blocked_s": self._schedule.cost_s})

    def _pickled(self, objects: Mapping[str, Any]) -> dict[str, bytes]:
        made = {}
        for key, value in objects.items():
            out = io.BytesIO()
            torch.save(value, out)
            made[key] = out.getvalue()
        return made

    def _padded(self, key: str, raw: bytes, room: int) -> bytes:
        known = self._blobs.get(key)
        if known is None or known[:2] != (raw, room):
            known = self._blobs[key] = (raw, room, padded_blob(raw, room))
        return known[2]

    def _fits(self, plan: _Plan, blobs: Mapping[str, bytes]) -> bool:
        return plan.rooms.keys() == blobs.keys() and all(
            len(raw) + 768 <= plan.rooms[key] for key, raw in blobs.items()
        )

    # ------------------------------------------------------------ the saver

    def _say(self, message: dict[str, Any], *files: int) -> None:
        if self._line is not None:
            try:
                self._line.send(message, files)
            except Gone as error:
                self._lose(error)

    def _listen(self) -> None:
        while self._line is not None:
            try:
                heard = self._line.receive(wait=False)
            except Gone as error:
                self._lose(error)
                return
            if heard is None:
                return
            self._take(heard[0])

    def _take(self, message: Mapping[str, Any]) -> None:
        match message["is"]:
            case "free" if self._plan is not None and message.get("plan") == self._plan.number:
                self._plan.buffers[message["buffer"]].busy = False
            case "copied" if self._plan is not None and message.get("plan") == self._plan.number:
                self._plan.buffers[message["buffer"]].copying = False
            case "committed":
                self._pending.discard(message["name"])
                self.newest = Committed(message["name"], message["step"], message["took_s"], message["size"])
                self._schedule.durable_s = self.newest.took_s
            case "written":
                self._pending.discard(message["name"])
            case "failed":
                self._pending.discard(message["name"])
                self._fail(message["step"], message["why"])

    def _fail(self, step: int, why: str) -> None:
        self.failed += 1
        self.last_error = f"the checkpoint of step {step} was not saved: {why}"
        if self._together is not None and self._together.rank == 0:
            _log.warning("%s", self.last_error)

    def _lose(self, error: Gone) -> None:
        """The saver is gone; another is started at the next save, when all ranks are here."""
        if self._line is not None:
            self._line.close()
        self._line = None
        if self._pending:
            self.failed += len(self._pending)
            self.last_error = f"the saver is gone, and with it what it had not committed: {error}"
            self._pending.clear()

    # ------------------------------------------------------------ loading

    @told.goes_on
    def load(self, state: dict[str, Any], *, required: bool = False) -> int | None:
        """Fill ``state`` from the newest checkpoint that is whole; its step, or None if there is none.

        Under an agent that is what workers that are gone had handed over last, if all of it is still
        in the memory of this node, or of other nodes where they hold copies; else the newest that was
        committed to disk.

        Tensors are filled in place. A damaged checkpoint is reported by name, and the one before
        it taken. Raises NoCheckpoint if ``required`` and none is whole, or if there are some and
        none of them is; ValueError where the checkpoint is whole and not of such a state.
        """
        together = self._in_this_world()
        self.tier = ""
        recalled, half = self._recall(together, state)
        if recalled is not None:
            return recalled
        wrong: dict[str, str] = {}  # by name, what is
        while True:
            # Read anew each time: what a saver still had to do may have come in between.
            there, complaint = self._committed(together)
            saved = next((s for s in reversed(there.saved) if s.name not in wrong), None)
            if complaint or saved is None:
                break
            flat, why, misfit = self._read(state, saved)
            said = [msgspec.json.decode(raw) for raw in together.gather(msgspec.json.encode((why, misfit)))]
            if misfits := [m for _, m in said if m]:
                raise ValueError(misfits[0])
            whys = [w for w, _ in said if w]
            if not whys:
                restore(state, flat)
                self.tier = "disk"
                if together.rank == 0:
                    for name in wrong.keys() & {s.name for s in there.saved}:
                        _log.warning("step %d is resumed from, since %s", saved.step, wrong[name])
                return saved.step
            wrong[saved.name] = whys[0]
        whole = [complaint] if complaint else [wrong[s.name] for s in reversed(there.saved)]
        if half:
            whole.append(f"what was in memory was lost while it was read: {half}")
        demanded = os.environ.get("ELASTICD_RESUME") == Resume.REQUIRED
        if whole or required or demanded:
            why = "; ".join(whole) or f"none was ever committed in {self._store.url}"
            sentence = f"no checkpoint is whole: {why}"
            if demanded:
                _end_the_job(sentence)
            raise NoCheckpoint(sentence)
        return None

    def load_plain(self, state: dict[str, Any], folder: str | os.PathLike[str]) -> None:
        """Fill ``state`` from one checkpoint that plain ``torch.distributed.checkpoint`` wrote. It has
        no checksums, so damage may go unnoticed; what its pickles may do is restricted.

        Raises BadCheckpoint, and ValueError where it is not of such a state."""
        from elasticd.worker.plaindcp import load_plain

        load_plain(Path(folder), state, self._in_this_world())

    def _recall(self, together: Together, state: dict[str, Any]) -> tuple[int | None, str]:
        """Fill ``state`` from memory, if the whole of a state that is no older than what was committed is
        in that of the job's nodes; its step. Else None, and, where ``state`` has been filled in part, why."""
        memories = Memories(_saver(), self._store.url)
        lost = ""
        try:
            offered = memories.survey() if together.rank == 0 else []
            there, _ = self._committed(together)  # after that: what is gone from memory since, is there now
            least = (there.newest.round, there.newest.step) if there.newest else (0, 0)
            choice = newest_whole(offered, least) if together.rank == 0 else None
            while True:
                said = together.gather(msgspec.json.encode(choice))[0]
                choice = msgspec.json.decode(said, type=Choice | None)
                if choice is None:
                    return None, lost
                flat, tier, gone, misfit = _from_memory(memories, choice, state)
                mine = msgspec.json.encode((tier, gone, misfit))
                heard = [msgspec.json.decode(raw) for raw in together.gather(mine)]
                if misfits := [misfit for _, _, misfit in heard if misfit]:
                    raise ValueError(misfits[0])
                losses = [gone for _, gone, _ in heard if gone]
                if not losses:
                    restore(state, flat)
                    self.tier = max(tier for tier, _, _ in heard)
                    if together.rank == 0:
                        where = "memory" if self.tier == "memory" else "memory, some of it other nodes'"
                        _log.info("step %d is resumed from %s", choice.step, where)
                    return choice.step, ""
                [node, lost] = losses[0]
                choice = choice.without(node)
        finally:
            memories.close()

    def _read(self, state: dict[str, Any], saved: Saved) -> tuple[Flat, str, str]:
        """What it holds; else what is wrong with it, or why it is not of such a state."""
        try:
            manifest = open_manifest(self._store, saved)
            target = Target.of(state, manifest.index)
            readers = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
            fill(self._store, manifest, target.wishes, readers=readers)
            return target.finish(), "", ""
        except BadCheckpoint as error:
            return Flat(), str(error), ""
        except ValueError as error:
            return Flat(), "", str(error)


def _from_memory(
    memories: Memories, choice: Choice, state: dict[str, Any]
) -> tuple[Flat, str, tuple[str, str] | None, str]:
    """What it holds and whose memory that was; else which node lost it, and why, or why it is not of such a
    state."""
    try:
        recalled = memories.recall(choice)
    except HolderLost as error:
        return Flat(), "", (error.node, str(error)), ""
    try:
        target = Target.of(state, recalled.index)
        recalled.fill(target.wishes)
        return target.finish(), "peer" if recalled.read - {""} else "memory", None, ""
    except HolderLost as error:
        return Flat(), "", (error.node, str(error)), ""
    except ValueError as error:
        return Flat(), "", None, str(error)
    finally:
        recalled.close()


def _shape(flat: Flat) -> tuple[Any, ...]:
    """Equal for states that can be saved by the same plan."""
    tensors = tuple(
        (key, t.shape, t.dtype, getattr(t, "placements", None)) for key, t in flat.tensors.items()
    )
    return tensors, tuple(flat.paths.items())


def _make_buffer(shard: Shard) -> _Buffer:
    memory = Memory.make(shard.size)
    for at, fixed in shard.fixed:
        memory.map[at : at + len(fixed)] = fixed
    image = torch.frombuffer(memory.map, dtype=torch.uint8)
    into = []
    for part, at in shard.parts:
        dtype = getattr(torch, part.dtype)
        into.append(image[at : at + part.size].view(dtype).view(part.sizes))
    return _Buffer(memory, image, into)


def _check_loadable(key: str, raw: bytes) -> None:
    try:
        torch.load(io.BytesIO(raw), weights_only=True)
    except Exception as error:
        raise TypeError(
            f"{key} could not be loaded again: checkpoints hold tensors and plain objects "
            f"(numbers, strings, lists, dicts), as torch.load(weights_only=True) takes them"
        ) from error


def _end_the_job(sentence: str) -> NoReturn:
    """``--resume=required``: another try would find nothing either."""
    told.fatal(Fatal.NO_CHECKPOINT)
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        extra = {"py_callstack": "", "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError), open(file, "w") as out:
            json.dump({"message": {"message": sentence, "extraInfo": extra}}, out)
    _log.error("%s", sentence)
    raise SystemExit(_NOTHING_WHOLE)


def _saver() -> str:
    """The name of the agent's; empty where there is none."""
    return os.environ.get("ELASTICD_SAVER", "")


def _host() -> str:
    """Equal for processes that can talk to each other without a network."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}/{os.geteuid()}"


def _start_saver() -> str:
    """A saver for those of this host, where no agent has one. It ends when all have left and what
    they left is done."""
    sock, name = handover.listen()
    with sock:
        program = _PROGRAM.format(root=_ROOT, fd=sock.fileno(), options="{}")
        _savers.append(
            subprocess.Popen(
                [sys.executable, "-c", program],
                stdin=subprocess.DEVNULL,
                pass_fds=[sock.fileno()],
                start_new_session=True,
            )
        )
    return name
