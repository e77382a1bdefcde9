"""Call functions with modules that the script imports now or later, without importing them ahead.

Standard library only, and self-contained. The script runs on if a function fails.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any


def after_import(calls: dict[str, Callable[[Any], None]]) -> None:
    """Call each function with its module: now if the module is there, as in a process that was forked from a
    zygote, else once the module is imported."""
    for name in [name for name in calls if name in sys.modules]:
        _safely(calls.pop(name), sys.modules[name])
    if calls:
        sys.meta_path.insert(0, ImportWatch(calls))


class ImportWatch:
    """A finder that notices each import once. It finds nothing itself, and leaves after the last import."""

    def __init__(self, calls: dict[str, Callable[[Any], None]]) -> None:
        self._calls = calls

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        call = self._calls.pop(name, None)
        if call is None:
            return None
        others = sys.meta_path[sys.meta_path.index(self) + 1 :]
        if not self._calls:
            sys.meta_path.remove(self)
        for finder in others:
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(name, path, target) if find else None
            if spec is not None:
                _call_after(spec.loader, call)
                return spec
        return None


def _call_after(loader: Any, call: Callable[[Any], None]) -> None:
    """Have the loader call the function with the module that it has loaded."""
    execute = loader.exec_module

    def exec_module(module: Any) -> None:
        execute(module)
        _safely(call, module)

    try:
        loader.exec_module = exec_module
    except AttributeError:  # the loader cannot be changed
        pass


def _safely(call: Callable[[Any], None], module: Any) -> None:
    try:
        call(module)
    except Exception:  # noqa: BLE001, S110  # an unknown torch: the script runs without what is wrapped
        pass
