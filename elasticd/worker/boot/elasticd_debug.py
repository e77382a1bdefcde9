"""Record what ``elasticd run --debug`` compares between ranks: collectives, weights, data and seeds.

* Collectives that Python code calls, in all process groups: torch's methods of ``ProcessGroup`` are wrapped.
* What DistributedDataParallel does in C++: its construction, the sums of a backward pass, its buffers.
* Digests of the weights under DistributedDataParallel, after a step of an optimizer.
* The batches of DataLoaders, with their samplers. The seed of torch. How the script ends.

Other collectives that begin in C++ (functional collectives, such as DTensor's) and sends between two ranks
are in torch's flight recorder only.

Standard library only, and self-contained. The script runs on if anything here fails.
"""

from __future__ import annotations

import os
import sys
import zlib

from elasticd_afterimport import after_import
from elasticd_recorder import serve
from elasticd_records import FOLDER, Records

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any

# By the method of ProcessGroup: the name in torch.distributed, which argument holds this rank's tensors, and
# whether the tensors have one shape in all ranks. With gloo those of all_gather and gather must have one,
# too.
_CALLS = {
    "allreduce": ("all_reduce", 0, True),
    "allreduce_coalesced": ("all_reduce_coalesced", 0, True),
    "broadcast": ("broadcast", 0, True),
    "reduce": ("reduce", 0, True),
    "allgather": ("all_gather", 1, False),
    "allgather_coalesced": ("all_gather_coalesced", 1, False),
    "allgather_into_tensor_coalesced": ("all_gather_into_tensor", 1, True),
    "_allgather_base": ("all_gather_into_tensor", 1, True),
    "all_gather_single": ("all_gather_into_tensor", 1, True),
    "all_gather_single_coalesced": ("all_gather_into_tensor", 1, True),
    "gather": ("gather", 1, False),
    "scatter": ("scatter", 0, True),
    "reduce_scatter": ("reduce_scatter", 0, False),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter_tensor", 1, True),
    "_reduce_scatter_base": ("reduce_scatter_tensor", 1, True),
    "reduce_scatter_single": ("reduce_scatter_tensor", 1, True),
    "reduce_scatter_single_coalesced": ("reduce_scatter_tensor", 1, True),
    "alltoall": ("all_to_all", 1, False),
    "alltoall_base": ("all_to_all_single", 1, False),
    "all_to_all_single": ("all_to_all_single", 1, False),
    "barrier": ("barrier", -1, False),
    "monitored_barrier": ("monitored_barrier", -1, False),
}
_SAME_WITH_GLOO = {"all_gather", "gather"}
_EACH_STEP, _EVERY = 16, 16  # the weights' digests: after each of the first steps, then now and then
_PARAMETERS = 24  # parameters whose digests are noted one by one
_BATCHES = 4  # the batches of an epoch whose digests are noted
_BATCH_BYTES = 1 << 16  # the bytes of each tensor of a batch that are digested


def start() -> None:
    """Wrap torch's functions, in modules that are imported now or later."""
    folder = os.environ.get(FOLDER)
    if folder:
        Recording(Records(folder)).begin()


class Recording:
    """The hooks in torch, and what they know."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._served = False
        self._models: list[Model] = []
        self._seeded = self._modelled = ""  # the last round with a note of the seed, and with a model
        self._loading = Loading(records)

    def begin(self) -> None:
        import atexit

        atexit.register(self._note_end)
        after_import(
            {
                "torch.distributed": self._wrap_collectives,
                "torch.nn.parallel.distributed": self._wrap_data_parallel,
                "torch.optim.optimizer": self._follow_optimizers,
                "torch.utils.data.dataloader": self._loading.wrap,
            }
        )

    # ------------------------------------------------------------ collectives

    def _wrap_collectives(self, distributed: Any) -> None:
        groups = getattr(distributed, "ProcessGroup", None)  # absent in a torch without torch.distributed
        for method, (name, argument, even) in _CALLS.items():
            inner = getattr(groups, method, None)
            if inner is not None:
                setattr(groups, method, self._recorded(inner, name, argument, even))

    def _recorded(
        self, inner: Callable[..., Any], name: str, argument: int, even: bool
    ) -> Callable[..., Any]:
        recording = self

        def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
            recording._note_call(self, name, args, argument, even)
            return inner(self, *args, **kwargs)

        _untraced(recorded)
        recorded.__name__, recorded.__doc__ = getattr(inner, "__name__", name), inner.__doc__
        return recorded

    def _note_call(self, group: Any, name: str, args: Sequence[Any], argument: int, even: bool) -> None:
        if not self._records.alive:
            return
        try:
            even = even or (name in _SAME_WITH_GLOO and group.name() == "gloo")
            tensors = list(_tensors(args[argument])) if 0 <= argument < len(args) else []
            shape = [list(tensor.shape) for tensor in tensors] if even else None
            dtype = _dtype(tensors[0]) if tensors else ""
            self._call(group, [name, _how(args), _short(shape), dtype], _text(tensors))
        except Exception:  # noqa: BLE001, S110  # an unknown torch: the collective is not recorded
            pass

    def _call(self, group: Any, same: list[Any], text: str) -> None:
        distributed = sys.modules["torch.distributed"]
        self._records.call(group.group_name, distributed.get_process_group_ranks(group), same, text)
        if not self._served:
            self._served = True
            serve(f"{os.environ['ELASTICD_PAGE']}.recorder")

    # ------------------------------------------------------------ DistributedDataParallel

    def _wrap_data_parallel(self, module: Any) -> None:
        kind = module.DistributedDataParallel
        init, sync_buffers = kind.__init__, kind._sync_buffers
        recording = self

        def made(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
            recording._seed()
            init(self, module, *args, **kwargs)
            recording._follow(self)

        def synced(self: Any) -> Any:
            recording._note_buffers(self)
            return sync_buffers(self)

        made.__doc__, made.__wrapped__ = init.__doc__, init
        _untraced(synced)
        _untraced(made)
        kind.__init__, kind._sync_buffers = made, synced

    def _follow(self, module: Any) -> None:
        """Record what a new DistributedDataParallel does."""
        try:
            if self._modelled != self._records.round:  # the models of an earlier round have ended with it
                self._modelled, self._models = self._records.round, []
            model = Model(len(self._models), module)
            self._models.append(model)
            same = ["DistributedDataParallel", "", [len(model.parameters)], ""]
            self._call(model.group, same, f"{len(model.parameters)} parameters")
            for parameter in model.parameters:
                if parameter.requires_grad:
                    parameter.register_hook(self._backward_of(model))
            model.note(self._records, 0)
        except Exception:  # noqa: BLE001, S110  # an unknown torch
            pass

    def _backward_of(self, model: Model) -> Callable[[Any], None]:
        """Return a function that is called for each gradient. The first one of a pass is recorded."""
        queue = sys.modules["torch"].autograd.Variable._execution_engine.queue_callback

        def passed() -> None:
            model.in_backward = False

        def arrived(_: Any) -> None:
            module = model.module()
            # The last forward pass prepared for no sums under no_sync().
            if (
                model.in_backward
                or model not in self._models
                or module is None
                or not module.require_forward_param_sync
            ):
                return
            try:
                queue(passed)
                model.in_backward = True
                trained = [one for one in model.parameters if one.requires_grad]
                same = ["backward", "", [sum(one.numel() for one in trained)], _dtype(trained[0])]
                self._call(model.group, same, f"{same[2][0]} {same[3]}, by DistributedDataParallel")
            except Exception:  # noqa: BLE001, S110  # an unknown torch
                pass

        _untraced(arrived)
        return arrived

    def _note_buffers(self, module: Any) -> None:
        try:
            buffers = [buffer for buffer in module.modules_buffers if buffer is not None]
            if buffers:
                same = ["broadcast of buffers", "", [len(buffers)], ""]
                self._call(module.process_group, same, f"{len(buffers)} buffers, by DistributedDataParallel")
        except Exception:  # noqa: BLE001, S110  # an unknown torch
            pass

    # ------------------------------------------------------------ steps

    def _follow_optimizers(self, optimizers: Any) -> None:
        def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
            if self._records.alive:
                self._stepped(optimizer)

        _untraced(stepped)
        optimizers.register_optimizer_step_post_hook(stepped)

    def _stepped(self, optimizer: Any) -> None:
        try:
            self._seed()
            self._loading.stepped()
            for model in self._models:
                if model.is_trained_by(optimizer):
                    model.stepped(self._records)
        except Exception:  # noqa: BLE001, S110  # an unknown kind of tensor
            pass

    def _seed(self) -> None:
        """Note the seed once in each round."""
        if self._seeded != self._records.round:
            self._seeded = self._records.round
            self._records.note("seed", seed=sys.modules["torch"].initial_seed())

    # ------------------------------------------------------------ the end

    def _note_end(self) -> None:
        error = getattr(sys, "last_value", None)
        if error is None:
            self._records.note("end")
            return
        innermost = ""
        traceback = error.__traceback__
        while traceback is not None:
            innermost = traceback.tb_frame.f_code.co_filename
            traceback = traceback.tb_next
        what = f"{type(error).__name__}: {error}".partition("\n")[0][:300]
        inside = any(f"/torch/{part}/" in innermost for part in ("distributed", "autograd"))
        self._records.note("end", error=what, at=self._records.place_of(error), in_collective=inside)


class Model:
    """A module in DistributedDataParallel. ``parameters``: those that it keeps equal in all ranks."""

    def __init__(self, number: int, module: Any) -> None:
        import weakref

        ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        named = [(name, one) for name, one in module.module.named_parameters() if name not in ignored]
        self.number = number
        self.module: Callable[[], Any] = weakref.ref(module)
        self.group = module.process_group
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self.in_backward = False
        self._trained = {id(one) for one in self.parameters if one.requires_grad}
        self._round = ""
        self._steps = 0

    def is_trained_by(self, optimizer: Any) -> bool:
        if self.module() is None:
            return False
        return any(id(one) in self._trained for group in optimizer.param_groups for one in group["params"])

    def stepped(self, records: Records) -> None:
        if self._round != records.round:
            self._round, self._steps = records.round, 0
        self._steps += 1
        if self._steps <= _EACH_STEP or self._steps % _EVERY == 0:
            self.note(records, self._steps)

    def note(self, records: Records, step: int) -> None:
        """Note digests of the weights."""
        ranks = sys.modules["torch.distributed"].get_process_group_ranks(self.group)
        digests = [_digest(one) for one in self.parameters]
        whole = zlib.crc32(b"".join(digest.to_bytes(4, "little") for digest in digests))
        records.note(
            "weights",
            model=self.number,
            step=step,
            ranks=[ranks[0], ranks[-1], len(ranks)],
            digest=whole,
            first=[[self.names[i][-40:], digests[i]] for i in range(min(_PARAMETERS, len(digests)))],
            at=records.place(),
        )


class LoaderEpoch:
    """One pass of a DataLoader. ``digests``: of the first batches, until an optimizer has stepped."""

    def __init__(self, loader: str, number: int) -> None:
        self.loader, self.number = loader, number
        self.batches = 0
        self.digests: list[int] = []
        self.trains = False


class Loading:
    """What DataLoaders load."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._epochs: Any = None  # by iterator, weakly
        self._numbers: dict[str, int] = {}
        self._now: LoaderEpoch | None = None

    def wrap(self, loading: Any) -> None:
        import weakref

        self._epochs = weakref.WeakKeyDictionary()
        iterate, following = loading.DataLoader.__iter__, loading._BaseDataLoaderIter.__next__
        mine = self

        def iterated(self: Any) -> Any:
            iterator = iterate(self)
            mine._begin(self, iterator)
            return iterator

        def fetched(self: Any) -> Any:
            try:
                batch = following(self)
            except StopIteration:
                mine._end(self)
                raise
            mine._fetched(self, batch)
            return batch

        _untraced(iterated)
        _untraced(fetched)
        loading.DataLoader.__iter__, loading._BaseDataLoaderIter.__next__ = iterated, fetched
        loading._BaseDataLoaderIter.next = fetched

    def stepped(self) -> None:
        """An optimizer has stepped: the loader of the last batch is one that the script trains with."""
        epoch = self._now
        if epoch is not None:
            epoch.trains = True
            for digest in epoch.digests:
                self._records.note("batch", loader=epoch.loader, epoch=epoch.number, digest=digest)
            epoch.digests.clear()

    def _begin(self, loader: Any, iterator: Any) -> None:
        if not self._records.alive:
            return
        try:
            place = self._records.place()
            number = self._numbers[place] = self._numbers.get(place, -1) + 1
            self._epochs[iterator] = LoaderEpoch(place, number)
            fields = {"samples": _length(loader.dataset), "batches": _length(loader)}
            self._records.note("epoch", loader=place, epoch=number, **fields, sampler=_sampler(loader))
        except Exception:  # noqa: BLE001, S110  # an unknown kind of loader
            pass

    def _fetched(self, iterator: Any, batch: Any) -> None:
        if not self._records.alive:
            return
        try:
            epoch = self._now = self._epochs.get(iterator)
            if epoch is not None:
                epoch.batches += 1
                if epoch.batches <= _BATCHES:
                    epoch.digests.append(_digest_of_batch(batch))
        except Exception:  # noqa: BLE001, S110  # an unknown kind of batch
            pass

    def _end(self, iterator: Any) -> None:
        try:
            epoch = self._epochs.get(iterator)
            if epoch is not None and epoch.trains:
                self._records.note(
                    "epoch ended", loader=epoch.loader, epoch=epoch.number, batches=epoch.batches
                )
        except Exception:  # noqa: BLE001, S110
            pass


# ---------------------------------------------------------------- values


def _tensors(value: Any) -> Iterator[Any]:
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, dict):
        for one in value.values():
            yield from _tensors(one)


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _text(tensors: Sequence[Any]) -> str:
    if not tensors:
        return ""
    size = " x ".join(map(str, tensors[0].shape)) or "one"
    more = f", and {len(tensors) - 1} more" if len(tensors) > 1 else ""
    return f"{size} {_dtype(tensors[0])}{more}"[:100]


def _short(shapes: Any) -> Any:
    """Return the shapes, or a checksum of many shapes."""
    text = str(shapes)
    return shapes if len(text) <= 100 else [len(shapes), zlib.crc32(text.encode())]


def _how(args: Sequence[Any]) -> str:
    """Return the reduction and the root, from the options of a collective."""
    words = []
    for options in args:
        reduction = getattr(options, "reduceOp", None) if hasattr(options, "reduceOp") else options
        kind: Any = getattr(reduction, "op", reduction)
        if type(kind).__name__ == "RedOpType":
            words.append(kind.name)
        if hasattr(options, "rootRank"):
            words.append(f"root {options.rootRank}")
    return ", ".join(words)


def _digest(tensor: Any) -> int:
    """Return a checksum of a tensor's bits."""
    torch = sys.modules["torch"]
    with torch.no_grad():
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return zlib.crc32(flat.numpy())


def _digest_of_batch(batch: Any) -> int:
    checksum = 0
    for tensor in _tensors(batch):
        if hasattr(tensor, "untyped_storage"):
            part = tensor.reshape(-1)[: _BATCH_BYTES // max(1, tensor.element_size())]
            checksum = zlib.crc32(_digest(part).to_bytes(4, "little"), checksum)
    return checksum


def _length(thing: Any) -> int:
    try:
        return len(thing)
    except Exception:  # noqa: BLE001  # an iterable dataset has no length
        return -1


def _sampler(loader: Any) -> dict[str, Any]:
    """Return the settings of a sampler that deals samples to ranks; empty if the sampler deals none."""
    sampler = getattr(loader, "sampler", None)
    if not hasattr(sampler, "num_replicas"):
        return {}
    names = ("num_replicas", "rank", "seed", "epoch", "shuffle")
    return {name: int(getattr(sampler, name)) for name in names if hasattr(sampler, name)}


def _untraced(function: Any) -> None:
    """Keep torch.compile from compiling the function and what the function calls, as torch.compiler.disable()
    does, but without importing the compiler."""
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = None
    try:
        frames: Any = sys.modules["torch._C._dynamo.eval_frame"]
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    except Exception:  # noqa: BLE001, S110  # an older torch
        pass
