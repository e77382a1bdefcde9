"""Turn a training state into keys and tensors, and back.

The state consists of modules, optimizers, and objects with ``state_dict``. The keys are those of
``torch.distributed.checkpoint.state_dict``, so that plain DCP can read them.
"""

from __future__ import annotations

import copy
import hashlib
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element

from elasticd.checkpoint.client.tensors import is_flattened, is_plain

Path = tuple[str | int, ...]
_WHOLE: Final = "elasticd: in one piece"
_KEYS: Final = "elasticd: keys"
_SOME: Final = "elasticd: entries "
_MANY: Final = 64  # entries; a list or mapping of small values with more entries is written in one piece
# Bytes; a value with more bytes of tensors is split, so that any rank can write a part.
_WHOLE_MAX: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Flat:
    """A flat state. ``tensors``: the tensors in use, not copies. ``paths``: where each key came from."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)


class Misfit(ValueError):
    """The states of the ranks differ, or a checkpoint does not fit the state. All ranks raise this error, and
    would raise it again after a restart."""


def require_names(state: object) -> None:
    """Raise TypeError unless the state is a mapping whose keys are names."""
    if not isinstance(state, Mapping):
        given = f"of the type {type(state).__name__}"
    elif odd := [name for name in state if not isinstance(name, str)]:
        given = f"a mapping with the key {odd[0]!r}"
    else:
        return
    raise TypeError(
        f"the state is {given}: give a dict of everything that belongs to it, by name, such as "
        '{"model": model, "optimizer": optimizer}'
    )


def flatten(state: Mapping[str, Any]) -> Flat:
    """Return the state as keys and values. ``state`` has, by name, modules, optimizers (of modules in
    ``state``), objects with ``state_dict`` and ``load_state_dict``, tensors, nests of these, and plain
    objects."""
    for name, value in state.items():
        if isinstance(value, nn.Module) and is_flattened(value):
            raise TypeError(
                f"{name} cannot be saved or loaded, as it is in FullyShardedDataParallel, whose optimizer "
                "state does not say which parameters it belongs to: use torch.distributed.fsdp.fully_shard"
            )
    nested = {name: _state_of(value, state) for name, value in state.items()}
    try:
        leaves, paths = flatten_state_dict(nested)
    except ValueError as error:
        raise ValueError(f"two entries of the state would be saved under one name: {error}") from error
    flat = Flat(paths=paths)
    for key, leaf in leaves.items():
        if isinstance(leaf, torch.Tensor):
            flat.tensors[key] = leaf.detach()
        else:
            flat.objects[key] = leaf
    return flat


def buffers_of(state: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keys of modules' buffers."""
    for name, value in state.items():
        if isinstance(value, nn.Module):
            for key, _ in _bare(value).named_buffers(remove_duplicate=False):
                yield f"{name}.{_plain(key)}"


def restore(state: dict[str, Any], flat: Flat) -> None:
    """Give the loaded values to everything that was not filled in place. Values without ``load_state_dict``
    are replaced in ``state``."""
    nested: dict[str, Any] = {}
    for key, leaf in (*flat.tensors.items(), *flat.objects.items()):
        set_element(nested, flat.paths[key], leaf)
    for name, value in state.items():
        loaded = nested.get(name)
        if isinstance(value, nn.Module):
            extra = any(flat.paths[key][0] == name for key in flat.objects)
            if extra or _gives_copies(value):
                _bare(value).load_state_dict(loaded or {}, strict=False)
        elif isinstance(value, torch.optim.Optimizer):
            _require_order(value, loaded or {}, _names(value, state), state)
            _restore_optimizer(value, loaded or {}, _names(value, state))
        elif name in nested:
            if _loads(value):
                value.load_state_dict(_from_dcp_form(loaded))
            else:
                state[name] = _from_dcp_form(loaded)


def prepare_optimizers(
    state: Mapping[str, Any], shapes: Mapping[str, tuple[torch.dtype, Path]], paths: Mapping[str, Path]
) -> None:
    """Create the state of optimizers that have not stepped, as the checkpoint has it, including lists and
    mappings of tensors.

    ``shapes``: the type and shape of each saved key. ``paths``: where keys came from, as far as known.
    """
    for name, value in state.items():
        if isinstance(value, torch.optim.Optimizer):
            names = _names(value, state)
            prefix = f"{name}.state."
            saved: dict[str | int, dict[Path, tuple[torch.dtype, Path]]] = {}
            for key, what in shapes.items():
                if key.startswith(prefix):
                    guess = key.removeprefix(prefix).rpartition(".")[::2]
                    # A path has one part if the whole key was one name.
                    parameter_name, *slot = paths.get(key, ())[2:] or guess
                    saved.setdefault(parameter_name, {})[tuple(slot)] = what
            for group in value.param_groups:
                for parameter in group["params"]:
                    have = value.state[parameter]
                    there = set(have)
                    for place, (dtype, shape) in saved.get(names[parameter], {}).items():
                        if place[0] not in there:
                            set_element(have, place, _empty_like(parameter, dtype, shape, group))


def _empty_like(
    parameter: torch.Tensor, dtype: torch.dtype, shape: Path, group: Mapping[str, Any]
) -> torch.Tensor:
    if tuple(parameter.shape) == tuple(shape):
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    on_device = group.get("capturable") or group.get("fused")
    return torch.zeros(
        tuple(int(n) for n in shape), dtype=dtype, device=parameter.device if on_device else "cpu"
    )


def _state_of(value: Any, state: Mapping[str, Any]) -> Any:
    if isinstance(value, nn.Module):
        return {_plain(key): leaf for key, leaf in _bare(value).state_dict().items()}
    if isinstance(value, torch.optim.Optimizer):
        return _optimizer_state(value, _names(value, state))
    return _in_dcp_form(value.state_dict() if _loads(value) else value)


def _in_dcp_form(value: Any) -> Any:
    """Return the value in a form that DCP preserves.

    DCP splits mappings by key. DCP loses keys that are not strings, empty mappings, and the types of
    mappings. A mapping that DCP would change is therefore stored in one piece, with a mark; if it is large,
    with its keys beside it. A list with many small entries is stored in one piece, too, and so are the
    entries without tensors of a mapping with many keys.
    """
    if isinstance(value, list | tuple) and not any(isinstance(v, dict | list) for v in value):
        return value
    if not isinstance(value, list | dict):
        return value
    size = _Size()
    size.add(value)
    if isinstance(value, list):
        if size.entries > _MANY and size.bytes <= _WHOLE_MAX and size.alone:
            return (_WHOLE, value)
        return [_in_dcp_form(v) for v in value]
    if value and type(value) in (dict, OrderedDict) and _are_plain(value.keys()):
        plain = _without_tensors(value) if len(value) > _MANY else {}
        parts = {_SOME + _keys_of(plain): (_WHOLE, plain)} if plain else {}
        return parts | {key: _in_dcp_form(v) for key, v in value.items() if key not in plain}
    return (_WHOLE, value) if size.bytes <= _WHOLE_MAX else _with_keys(value)


def _from_dcp_form(value: Any) -> Any:
    """Return the original value of ``_in_dcp_form``."""
    if _is_whole(value):
        return value[1]
    if isinstance(value, dict) and _KEYS in value:
        _, (mapping, names) = value[_KEYS]
        for name, key in names.items():
            mapping[key] = _from_dcp_form(value[name])
        return mapping
    if isinstance(value, dict):
        made: dict[str, Any] = {}
        for key, part in value.items():
            if isinstance(key, str) and key.startswith(_SOME) and _is_whole(part):
                _merge(made, part[1])
            else:
                made[key] = _from_dcp_form(part)
        return made
    return [_from_dcp_form(v) for v in value] if isinstance(value, list) else value


def _merge(made: dict[str, Any], others: Mapping[str, Any]) -> None:
    for key, part in others.items():
        if isinstance(part, dict) and isinstance(made.get(key), dict):
            _merge(made[key], part)
        else:
            made[key] = part


def _without_tensors(value: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for key, part in value.items():
        size = _Size()
        size.add(part)
        if not size.tensors:
            found[key] = part
    return found


def _keys_of(value: Any) -> str:
    """Return a digest of the keys at all levels. Ranks with different keys thus save them under
    different names."""
    summary = hashlib.blake2b(digest_size=8)

    def take(part: Any) -> None:
        if isinstance(part, dict):
            summary.update(f"{len(part)} ".encode())
            for key, item in part.items():
                summary.update(f"{key!r} ".encode())
                take(item)
        elif isinstance(part, list | tuple):
            for item in part:
                take(item)

    take(value)
    return summary.hexdigest()


def _is_whole(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str) and value[0] == _WHOLE


def _are_plain(keys: Collection[Any]) -> bool:
    """Whether DCP can distinguish the keys once they are joined by dots: ``a.b``, and ``b`` in ``a``."""
    if not all(type(key) is str for key in keys):
        return False
    cut = (key.split(".") for key in keys if "." in key)
    return not any(".".join(parts[:n]) in keys for parts in cut for n in range(1, len(parts)))


def _with_keys(value: dict[Any, Any]) -> dict[str, Any]:
    names = {f"{type(key).__name__} {key!r}": key for key in value}
    if len(names) != len(value):
        raise ValueError("two keys of a mapping have the same text: use plain numbers or strings as keys")
    empty = copy.copy(value)
    empty.clear()
    parts = {name: _in_dcp_form(value[key]) for name, key in names.items()}
    return {_KEYS: (_WHOLE, (empty, names)), **parts}


@dataclass(slots=True)
class _Size:
    """The size of a nested value. ``alone``: all its tensors are unsharded and in the host's memory."""

    entries: int = 0
    tensors: int = 0
    bytes: int = 0
    alone: bool = True

    def add(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self.entries += 1
            self.tensors += 1
            self.bytes += value.nbytes
            self.alone = self.alone and type(value) is torch.Tensor and value.device.type == "cpu"
        elif isinstance(value, dict | list | tuple):
            for part in value.values() if isinstance(value, dict) else value:
                self.add(part)
        else:
            self.entries += 1


def _loads(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _bare(module: nn.Module) -> nn.Module:
    while isinstance(module, nn.parallel.DistributedDataParallel):
        module = module.module
    return module


def _gives_copies(module: nn.Module) -> bool:
    """Whether some tensors in the module's state dict are copies, as hooks and overrides may make them.
    Filling such a copy would not change the module."""
    own = {_memory(t) for t in (*module.parameters(), *module.buffers())}
    given = _bare(module).state_dict().values()
    return any(isinstance(t, torch.Tensor) and t.numel() and _memory(t) not in own for t in given)


def _memory(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.untyped_storage().data_ptr() if is_plain(local.detach()) else id(tensor)


def _plain(name: str) -> str:
    """Return the name without torch.compile's prefix."""
    return name.replace("_orig_mod.", "")


def _names(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> dict[torch.Tensor, str]:
    """Return the names of the optimizer's parameters, as in their module. If the parameters are from several
    modules, each name begins with the module's name in ``state``."""
    wanted = set(_parameters(optimizer))
    together: dict[torch.Tensor, str] = {}
    for module, value in state.items():
        if isinstance(value, nn.Module):
            names: dict[torch.Tensor, str] = {p: _plain(name) for name, p in _bare(value).named_parameters()}
            if wanted <= names.keys():
                return names
            together = {p: f"{module}.{name}" for p, name in names.items()} | together
    if wanted <= together.keys():
        return together
    raise ValueError(
        "an optimizer is to be saved, but not all modules whose parameters it has: add them to the state"
    )


def _optimizer_state(optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]) -> dict[str, Any]:
    state = {
        names[p]: {k: _in_dcp_form(v) for k, v in optimizer.state[p].items()}
        for p in _parameters(optimizer)
        if optimizer.state.get(p)
    }
    groups = [
        {**{k: v for k, v in group.items() if k != "params"}, "params": [names[p] for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    return {"state": state, "param_groups": groups}


def _require_order(
    optimizer: torch.optim.Optimizer,
    loaded: Mapping[str, Any],
    names: Mapping[torch.Tensor, str],
    state: Mapping[str, Any],
) -> None:
    """Raise ValueError if the order of the groups has changed and a scheduler depends on it."""
    if not any(getattr(value, "optimizer", None) is optimizer for value in state.values()):
        return
    of = {
        name: n for n, group in enumerate(loaded.get("param_groups", ())) for name in group.get("params", ())
    }
    order = [of.get(names[p], n) for n, group in enumerate(optimizer.param_groups) for p in group["params"]]
    if order != sorted(order):
        raise ValueError(
            "the optimizer's groups are in another order than when they were saved, and its scheduler relies "
            "on the order: build the groups in the saved order"
        )


def _restore_optimizer(
    optimizer: torch.optim.Optimizer, loaded: Mapping[str, Any], names: Mapping[torch.Tensor, str]
) -> None:
    _restore_groups(optimizer, loaded.get("param_groups", ()), names)
    state = loaded.get("state", {})
    for parameter in _parameters(optimizer):
        saved = _from_dcp_form(state.get(names[parameter], {}))
        if saved:
            have = optimizer.state[parameter]
            for slot in have.keys() - saved.keys():
                del have[slot]
            have.update(saved)
        else:  # the saved optimizer had no state, as before its first step
            optimizer.state.pop(parameter, None)


def _restore_groups(
    optimizer: torch.optim.Optimizer, saved: Sequence[Mapping[str, Any]], names: Mapping[torch.Tensor, str]
) -> None:
    """Give each group the settings that its parameters had, in any order of groups. Raises ValueError if they
    had different settings."""
    of = {name: number for number, group in enumerate(saved) for name in group.get("params", ())}
    for number, group in enumerate(optimizer.param_groups):
        its = sorted({of[names[p]] for p in group["params"] if names[p] in of})
        if not its and number < len(saved) and not (group["params"] and of):
            its = [number]  # only the number identifies the group
        settings = [{k: v for k, v in saved[n].items() if k not in ("params", "param_names")} for n in its]
        if any(str(other) != str(settings[0]) for other in settings[1:]):
            first = names[group["params"][0]]
            raise ValueError(
                f"the parameters that the optimizer has in one group ({first} and others) were in several, "
                "with different settings: build the groups as they were saved"
            )
        if settings:
            group.update(settings[0])


def _parameters(optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])
