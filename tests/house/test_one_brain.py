"""The core decides. The daemon looks, writes and kills. Seven of its modules ask the core what to do."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
HOUSE = ROOT / "elasticd"
DAEMON = sorted((HOUSE / "daemon").rglob("*.py"))
TIES = {
    "driver.py",
    "gathering.py",
    "hangs.py",
    "leading.py",
    "observer.py",
    "round_watch.py",
    "timekeeper.py",
}  # modules between the core's decisions and the edges; the simulator runs them, too
REASONS = "elasticd.core.reasons"
ORDERS = {"condemn", "fence", "leave", "stop"}  # calls of ``core.ports.Procs`` that end workers


def imported(file: Path) -> Iterator[tuple[str, str]]:
    """Yield each name that is imported from elasticd's packages: its module, and the name."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("elasticd"):
            yield from ((node.module or "", alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name.startswith("elasticd"))


def file_of(module: str) -> Path | None:
    base = ROOT.joinpath(*module.split("."))
    return next((f for f in (base.with_suffix(".py"), base / "__init__.py") if f.is_file()), None)


def is_function(module: str, name: str) -> bool:
    file = file_of(module)
    assert file is not None
    if any(isinstance(n, ast.FunctionDef) and n.name == name for n in ast.parse(file.read_text()).body):
        return True
    return any(is_function(origin, name) for origin, n in imported(file) if n == name and file_of(origin))


def called() -> Iterator[tuple[str, str]]:
    for file in DAEMON:
        for module, name in imported(file) if file.name not in TIES else ():
            if module.startswith("elasticd.core") and file_of(module) and is_function(module, name):
                yield file.name, f"{module}.{name}"


def modules_used() -> Iterator[tuple[str, str]]:
    for file in DAEMON:
        for module, name in imported(file) if file.name not in TIES else ():
            if module.startswith("elasticd.core") and file_of(f"{module}.{name}"):
                yield file.name, f"{module}.{name}"


def test_the_daemon_asks_the_core_for_decisions_in_seven_places_only() -> None:
    assert not list(called())
    assert not list(modules_used())


def makes_reasons(file: Path) -> bool:
    reasons = {name for module, name in imported(file) if module == REASONS}
    calls = (node.func for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call))
    return any(isinstance(call, ast.Name) and call.id in reasons for call in calls)


def test_the_daemon_gives_no_reasons_of_its_own() -> None:
    """A reason says why something was decided, so a module that makes a reason decides."""
    assert not [file.name for file in DAEMON if makes_reasons(file)]


def gives_orders(file: Path) -> bool:
    """Whether the module ends workers, by a call of ``procs`` or of the inspector."""
    calls = (node.func for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call))
    return any(
        isinstance(call, ast.Attribute)
        and call.attr in ORDERS
        and ast.unparse(call.value).removeprefix("self.").strip("_") in ("inspector", "procs")
        for call in calls
    )


def test_the_daemon_ends_workers_only_where_it_carries_out_actions_of_the_core() -> None:
    """``inspector`` passes ``Condemn`` on. ``run_agent`` stops workers once the agent itself has failed."""
    ends = {file.name for file in DAEMON if gives_orders(file)}
    assert ends == {"driver.py", "hangs.py", "inspector.py", "run_agent.py"}


def reached(*starts: str) -> set[str]:
    """Return all modules of the core that these modules import, directly or not."""
    seen: set[str] = set()
    todo = list(starts)
    while todo:
        module = todo.pop()
        file = file_of(module)
        if file is None or module in seen:
            continue
        seen.add(module)
        names = (n for origin, name in imported(file) for n in (origin, f"{origin}.{name}"))
        todo += [name for name in names if name.startswith("elasticd.core")]
    return seen


def test_the_core_holds_what_agent_and_leader_decide_with() -> None:
    decides = reached(*(f"elasticd.daemon.{tie.removesuffix('.py')}" for tie in sorted(TIES)))
    modules = {
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for file in (HOUSE / "core").rglob("*.py")
    }
    assert not modules - decides - {"elasticd.core"}


def test_a_decision_is_known_for_one_wherever_it_is_imported_from() -> None:
    assert is_function("elasticd.core.leader", "decide") and not is_function("elasticd.core.leader", "View")
