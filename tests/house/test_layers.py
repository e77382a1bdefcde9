"""Which module may import which. import-linter checks the arrows between packages, as pyproject.toml has
them. Here are the rules about single files, and about packages from outside."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HOUSE = ROOT / "elasticd"
MODULES = sorted(HOUSE.rglob("*.py"))


def imports(module: Path) -> Iterator[str]:
    """Return the full names of everything that the module imports at any place, such as ``etcd3`` or
    ``a.b.c``."""
    package = module.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(module.read_text(), module)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            origin = ".".join(filter(None, (base, node.module)))
            yield from (f"{origin}.{alias.name}" for alias in node.names)


def roots(module: Path) -> set[str]:
    return {name.partition(".")[0] for name in imports(module)}


def within(package: str) -> list[Path]:
    found = [m for m in MODULES if m.relative_to(HOUSE).parts[0] == package]
    assert found, f"elasticd/{package} is gone; these rules were about it"
    return found


def name(module: Path) -> str:
    return str(module.relative_to(ROOT))


@pytest.mark.parametrize("package", ["core", "data"])
def test_pure_packages_import_only_the_standard_library_and_themselves(package):
    for module in within(package):
        foreign = {i for i in imports(module) if i.partition(".")[0] not in sys.stdlib_module_names}
        assert not {i for i in foreign if not i.startswith(f"elasticd.{package}")}, name(module)


def test_pure_packages_import_no_clock_no_randomness_and_no_input_or_output():
    effects = {
        "asyncio", "datetime", "io", "logging", "multiprocessing", "os", "pathlib", "queue", "random",
        "secrets", "select", "shutil", "signal", "socket", "subprocess", "tempfile", "threading", "time",
        "uuid",
    }  # fmt: skip
    found = {name(module): roots(module) & effects for module in [*within("core"), *within("data")]}
    assert not {module: used for module, used in found.items() if used}


def test_the_table_of_imports_in_the_architecture_is_what_the_packages_import():
    table = (ROOT / "ARCHITECTURE.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (`\w+`(?:, `\w+`)*) \|$", table, re.MULTILINE)
    told = {package: set(re.findall(r"\w+", imported)) for package, imported in rows}
    packages = {folder.name for folder in HOUSE.iterdir() if (folder / "__init__.py").is_file()}
    found = {
        package: {name.split(".")[1] for m in within(package) for name in imports(m) if "elasticd." in name}
        & (packages - {package})
        for package in packages
    }
    assert told == {package: imported for package, imported in found.items() if imported}


def test_one_file_alone_imports_etcd3():
    assert [name(m) for m in MODULES if "etcd3" in roots(m)] == ["elasticd/etcd/_client3.py"]


def test_one_file_alone_reads_the_control_groups_of_the_process():
    found = [name(m) for m in MODULES if 'Path("/proc/self/cgroup")' in m.read_text()]
    assert found == ["elasticd/control_groups.py"]


def may_wait_for_torch(module: Path) -> bool:
    parts = module.relative_to(HOUSE).parts
    return parts[0] in {"daemon", "integrations", "torchrun", "worker"} or parts[:2] == (
        "checkpoint",
        "client",
    )


def imports_torch_at_once(module: Path) -> bool:
    at_import = ast.parse(module.read_text()).body
    names = {alias.name for node in at_import if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in at_import if isinstance(node, ast.ImportFrom)}
    return "torch" in {n.partition(".")[0] for n in names}


def test_torch_is_imported_late_where_people_wait_for_an_answer():
    """An import of torch takes 1.5 s, for which people would wait at each ``elasticd status``."""
    assert not [name(m) for m in MODULES if imports_torch_at_once(m) and not may_wait_for_torch(m)]


def imported_of_elasticd(program: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(program.read_text())))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in names if name.partition(".")[0] == "elasticd"}


def test_starting_points_need_at_most_the_library_for_scripts():
    found = {program.stem: imported_of_elasticd(program) for program in (ROOT / "workers").glob("*.py")}
    assert set().union(*found.values()) == {"elasticd.worker"}
    assert not found["train_gpt"] | found["gpt"] | found["restarting"], "plain torchrun scripts"
