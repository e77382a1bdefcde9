"""Nothing that comes from etcd, a socket or a disk may run code here."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = sorted([*(ROOT / "elasticd").rglob("*.py"), *(ROOT / "workers").rglob("*.py")])
# DCP's metadata is a pickle: read there by an unpickler that knows DCP's record types and nothing else.
RESTRICTED = ROOT / "elasticd/checkpoint/format/metadata.py"
UNPICKLERS = {"pickle", "cPickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}


def name(module: Path) -> str:
    return str(module.relative_to(ROOT))


@pytest.mark.parametrize("module", OURS, ids=name)
def test_nothing_is_unpickled(module):
    for node in ast.walk(ast.parse(module.read_text(), module)):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=origin), attr="load" | "loads" | "Unpickler")):
                assert origin not in UNPICKLERS, f"line {node.lineno} unpickles"
            case ast.ImportFrom(module=origin):
                taken = {alias.name for alias in node.names}
                assert origin not in UNPICKLERS or taken <= {"UnpicklingError"}, f"line {node.lineno}"


@pytest.mark.parametrize("module", [m for m in OURS if "elasticd" in m.parts and m != RESTRICTED], ids=name)
def test_the_agent_does_not_even_import_pickle(module):
    for node in ast.walk(ast.parse(module.read_text(), module)):
        if isinstance(node, ast.Import):
            assert not {alias.name for alias in node.names} & UNPICKLERS, f"line {node.lineno}"


@pytest.mark.parametrize("module", OURS, ids=name)
def test_torch_loads_weights_only(module):
    for node in ast.walk(ast.parse(module.read_text(), module)):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="load")):
                given = {k.arg: k.value for k in node.keywords}
                value = given.get("weights_only")
                assert isinstance(value, ast.Constant) and value.value is True, f"line {node.lineno}"
            case ast.Attribute(attr="recv_object_list" | "broadcast_object_list" | "all_gather_object"):
                pytest.fail(f"line {node.lineno}: {node.attr} unpickles what others send")


# begin.py runs before anything of others can be imported, and names this user's own paths.
PRINTS = {"elasticd/cli/say.py", "elasticd/cli/begin.py"}


@pytest.mark.parametrize(
    "module",
    [m for m in OURS if m.is_relative_to(ROOT / "elasticd/cli") and name(m) not in PRINTS],
    ids=name,
)
def test_commands_print_through_what_cleans_text(module):
    for node in ast.walk(ast.parse(module.read_text(), module)):
        match node:
            case ast.Call(func=ast.Name(id="print") | ast.Attribute(attr="echo" | "secho")):
                pytest.fail(f"line {node.lineno}: print through elasticd.cli.say")


@pytest.mark.parametrize(
    "module",
    [m for m in OURS if re.match("elasticd/(checkpoint/(?!client)|daemon|etcd|torchrun)", name(m))],
    ids=name,
)
def test_where_there_are_threads_decoders_are_made_before_them(module):
    """msgspec looks at a class when it first decodes it, and crashes where two threads do that at once."""
    for node in ast.walk(ast.parse(module.read_text(), module)):
        match node:
            case ast.Call(func=ast.Attribute(attr="decode"), keywords=[ast.keyword(arg="type", value=kind)]):
                assert ast.unparse(kind) == "dict", f"line {node.lineno}: have a Decoder in the module"
