"""The changes that were made since the last commit, and whether they can be undone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from elasticd.worker.commit.changes import ChangeDetector
from elasticd.worker.commit.copies import Undo
from elasticd.worker.gradients.wrapping import WrappedModels
from elasticd.worker.report import all_finite, not_finite, policy
from elasticd.worker.values.contents import Contents, gradients_of, parameters_of
from elasticd.worker.world.group import World, rank

_log = logging.getLogger(__name__)
LOOKS_INTO = 3  # until this many commits, elements are compared as well: .data changes no version


@dataclass(frozen=True, slots=True)
class Owners:
    """The parameters of each optimizer (``trained``) and of each module (``modules``), as sets of the
    parameters' numbers."""

    trained: Mapping[str, Set[int]]
    modules: Sequence[Set[int]] = ()

    def outside(self, changed: Set[int], stepped: Iterable[str]) -> set[int]:
        """Return the changed parameters that none of the ``stepped`` optimizers trains."""
        return set(changed).difference(*(self.trained[name] for name in stepped))

    def to_copy(self, outside: Set[int], stepped: Iterable[str]) -> set[int]:
        """Return the parameters to copy at each commit, given the parameters (``outside``) and optimizers
        (``stepped``) that change before the last sum of a step. Without a copy, a worker that dies during the
        sum would leave no worker with a whole state.

        If one parameter of a module changes that no optimizer trains, all such parameters of the module are
        copied. The others may change later, for example averages of a layer that is still frozen.
        """
        followers = (set(of).difference(*self.trained.values()) for of in self.modules)
        together = (of for of in followers if of & outside)
        return set(outside).union(*(self.trained[name] for name in stepped), *together)

    def swapped(self, outside: Set[int], frozen: Set[int]) -> list[Set[int]]:
        """Return the modules whose parameters have all changed, frozen parameters aside. A frozen parameter
        will change with the others once it is unfrozen."""
        return [of for of in self.modules if of - frozen and of - frozen <= outside]


class Uncommitted:
    """The changes since the last commit, and the copies to undo them.

    ``stepped``: the optimizers that have begun a step. ``undo``: whether parameters and optimizers' state are
    copied at each commit. True: always. False: never. None: once they have changed before the last sum of a
    step. ``kept_elsewhere``: parameters and optimizers' state are copied and restored by others.
    """

    def __init__(
        self, contents: Contents, models: WrappedModels, undo: bool | None, *, kept_elsewhere: bool = False
    ) -> None:
        self.stepped: set[str] = set()
        self._contents, self._models, self._undoes = contents, models, undo
        self._kept_elsewhere = kept_elsewhere
        self._world: World | None = None
        self._gpus: set[torch.device] = set()
        self._torn = False
        self._commits = 0  # the number of commits of this process
        self._calls = 0  # the number of collectives when an optimizer last began a step
        self._evaluated = 0  # forward passes without gradients, since the last commit
        self._unused: tuple[torch.Tensor, torch.Tensor] | None = None  # a parameter and its unused gradient
        self._warned = False
        self._changes = ChangeDetector(contents.parameters())
        numbers = {id(p): n for n, p in enumerate(self._changes.parameters)}
        trained = {
            name: {numbers[id(p)] for p in parameters_of(o) if id(p) in numbers}
            for name, o in contents.optimizers.items()
        }
        of_modules = [
            {numbers[id(p)] for p in m.parameters() if id(p) in numbers} for m in contents.modules.values()
        ]
        self._owners = Owners(trained, of_modules)
        self._swapped: list[Set[int]] = []
        self._undo = Undo(self._changes.parameters, contents.optimizers)
        if undo:
            self._undo.want(range(len(numbers)), contents.optimizers)
        for name, optimizer in contents.optimizers.items():
            optimizer.register_step_pre_hook(partial(self._before_step, name))

    # ------------------------------------------------------------ commits

    @property
    def is_torn(self) -> bool:
        """Whether an optimizer has begun a step that cannot be undone."""
        return not self._kept_elsewhere and (self._torn or not self._undo.covers((), self.stepped))

    @property
    def wanted(self) -> tuple[list[int], list[str]]:
        """The parameters and optimizers that are copied at each commit, for ``want`` in another worker."""
        return self._undo.wanted

    def want(self, wanted: tuple[list[int], list[str]]) -> None:
        """Copy at each commit what another worker copies. This worker will change the same values."""
        if self._undoes is not False:
            self._undo.want(*wanted)

    def enter(self, world: World | None) -> None:
        self._world = world
        self._gpus = {p.device for p in self._contents.parameters() if p.is_cuda}

    def before_commit(self) -> None:
        """Make sure that all sums of the steps have arrived. Raises WorldChanged."""
        if self.stepped:
            if not self._kept_elsewhere:
                self._warn_of_calls()
        else:
            self._unused = self._unused_gradient()
        if self._world is not None and (not self.stepped or self._world.sums_begun):
            self._world.require_all_sums()
        self._commits += 1

    def keep(self) -> None:
        """Keep the present values, so that this worker can go back to them."""
        if self._swapped:
            self._undo.want(set().union(*self._swapped) - self._frozen(), ())
        self._undo.keep()
        self._changes.note()
        self.stepped.clear()
        self._evaluated = 0
        self._torn = False

    def tear(self) -> None:
        """Note that some values were overwritten, for example by a damaged checkpoint."""
        self._torn = True

    def go_back(self) -> bool:
        """Leave the world, and undo all changes. Return whether that was possible."""
        self._world = self._unused = None
        outside = self._outside(contents=True)
        if not self._torn and (self.stepped or outside):
            self._torn = not self._undo.covers(outside, self.stepped)
            if not self._torn:
                self._undo.put_back()
                self._changes.note()
        self.stepped.clear()
        return not self._torn

    # ------------------------------------------------------------ steps

    def before_forward(self) -> None:
        """Look for weights that the script has swapped in for an evaluation, such as averages.

        Called before a forward pass without gradients, since the script may swap the weights back before the
        next step. The check runs in passes 1, 2, 4, 8 and so on after a commit.
        """
        if self._world is None or self.stepped or torch.is_grad_enabled():
            return
        self._evaluated += 1
        if self._evaluated.bit_count() == 1 and (outside := self._outside(contents=True)):
            self._copy_from_now_on(outside, set())

    def _before_step(
        self, name: str, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Check an optimizer's step. If the step has a closure, the check runs after the closure, which
        computes the gradients."""
        closure = kwargs.get("closure") or next(iter(args[1:]), None)
        if not callable(closure):
            self._check_step(name)
            return None
        checked = partial(self._checked, name, closure)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": checked}
        return (args[0], checked, *args[2:]), kwargs

    def _checked(self, name: str, closure: Callable[[], Any]) -> Any:
        if name in self.stepped:  # as in LBFGS, whose step calls the closure again after a change
            self._copy_from_now_on(set(), {name})
        loss = closure()
        self._check_step(name)
        return loss

    def _check_step(self, name: str) -> None:
        """Check an optimizer's step right before the optimizer changes parameters. Raises WorldChanged."""
        self._refuse_carried_gradients()
        self._models.refuse_unfrozen()
        world = self._world
        if world is not None and (not self.stepped or world.sums_begun):
            outside = self._outside(contents=self._commits < LOOKS_INTO)
            if self.stepped or outside:
                self._copy_from_now_on(outside, self.stepped)
            for gpu in self._gpus:
                torch.cuda.current_stream(gpu).synchronize()  # the sums have arrived, or the world ends
                world.check()
            world.require_all_sums()
        if policy() != "ignore" and not all_finite(gradients_of(self._contents.optimizers[name])):
            not_finite("a gradient is NaN or infinite")
        self.stepped.add(name)
        self._calls = self._models.calls()

    def _outside(self, *, contents: bool) -> set[int]:
        """Return the parameters that changed although their optimizer has not begun a step."""
        changed = self._changes.changed(contents=contents)
        return self._owners.outside(changed, self.stepped) if changed else changed

    def _copy_from_now_on(self, outside: set[int], stepped: set[str]) -> None:
        """From the next commit on, copy these parameters (``outside``) and optimizers (``stepped``), which
        change before the last sum of a step."""
        if self._undoes is False or self._kept_elsewhere:
            return
        self._swapped += [m for m in self._owners.swapped(outside, self._frozen()) if m not in self._swapped]
        if not self._undo.want(self._owners.to_copy(outside, stepped), stepped):
            return
        if self._world is not None and self._world.rank == 0:
            _log.warning(
                "%s changes parameters before the last sum of a step over the workers: from now on they are "
                "copied at each commit (%.0f MB), so that a step can be undone (undo=False: no copy)",
                ", ".join(sorted(stepped)) or "something else than an optimizer",
                self._undo.nbytes / 1e6,
            )

    def _frozen(self) -> set[int]:
        return {n for n, parameter in enumerate(self._changes.parameters) if not parameter.requires_grad}

    def _warn_of_calls(self) -> None:
        """Warn once if the script uses collectives while a step can be neither finished nor undone."""
        if self._warned or self._models.calls() == self._calls or self._undo.covers((), self.stepped):
            return
        self._warned = True
        if rank() == 0:
            _log.warning(
                "collectives are called between the optimizer's step and state.commit(): if a worker is lost "
                "there, no worker can finish the step or undo it. Call them before the step or after the "
                "commit, or give State undo=True"
            )

    def _unused_gradient(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return a parameter with its gradient, if there is one that no optimizer's step has used before this
        commit; None otherwise."""
        for optimizer in self._contents.optimizers.values():
            for parameter in parameters_of(optimizer):
                if parameter.grad is not None:
                    return (parameter, parameter.grad) if all_finite(gradients_of(optimizer)) else None
        return None

    def _refuse_carried_gradients(self) -> None:
        if self._unused is not None and self._unused[0].grad is self._unused[1]:
            raise RuntimeError(
                "gradients were added up over several commits, and would be lost at a change of world: call "
                "state.commit() after the optimizer's step, and not after each backward pass; where a step "
                "is left out on purpose, call optimizer.zero_grad() before state.commit()"
            )
        self._unused = None
