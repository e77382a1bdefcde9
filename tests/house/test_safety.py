"""Nothing that comes from etcd, a socket or a disk may run code here."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
OURS = sorted([*(ROOT / "elasticd").rglob("*.py"), *(ROOT / "workers").rglob("*.py")])
# DCP's metadata is a pickle. An unpickler reads it that accepts DCP's record types and nothing else.
RESTRICTED = "elasticd/checkpoint/format/metadata.py"
UNPICKLERS = {"pickle", "cPickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}
# begin.py runs before modules of other people can be imported, and names this user's own paths. probe.py
# prints into a pipe.
PRINTS = {"elasticd/cli/say.py", "elasticd/cli/begin.py", "elasticd/cli/doctor/probe.py"}


def nodes(within: str = "") -> Iterator[tuple[str, str, ast.AST]]:
    """Yield the syntax of all modules whose path begins so: the module, its line, and the node."""
    for module in OURS:
        if re.match(within, path := str(module.relative_to(ROOT))):
            for node in ast.walk(ast.parse(module.read_text(), module)):
                yield path, f"{path}:{getattr(node, 'lineno', 0)}", node


def test_nothing_is_unpickled():
    found = []
    for _, place, node in nodes():
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=origin), attr="load" | "loads" | "Unpickler")):
                found += [place] if origin in UNPICKLERS else []
            case ast.ImportFrom(module=origin):
                taken = {alias.name for alias in node.names}
                found += [place] if origin in UNPICKLERS and taken - {"UnpicklingError"} else []
    assert not found


def test_the_agent_does_not_even_import_pickle():
    imports = [(p, place, n) for p, place, n in nodes("elasticd/") if isinstance(n, ast.Import)]
    found = [(p, place) for p, place, n in imports if {alias.name for alias in n.names} & UNPICKLERS]
    assert {path for path, _ in found} == {RESTRICTED}, found


def test_torch_loads_weights_only():
    found = []
    for _, place, node in nodes():
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="load")):
                value = {k.arg: k.value for k in node.keywords}.get("weights_only")
                found += [] if isinstance(value, ast.Constant) and value.value is True else [place]
            case ast.Attribute(attr="recv_object_list" | "broadcast_object_list" | "all_gather_object"):
                found.append(place)  # they unpickle what other processes send
    assert not found


def test_commands_print_through_what_cleans_text():
    found = []
    for path, place, node in nodes("elasticd/cli"):
        match node:
            case ast.Call(func=ast.Name(id="print") | ast.Attribute(attr="echo" | "secho")):
                found += [] if path in PRINTS else [place]
    assert not found, "print through elasticd.cli.say"


def test_where_there_are_threads_decoders_are_made_before_them():
    """msgspec looks at a class when it first decodes the class. It crashes if two threads do that at once."""
    found = []
    for _, place, node in nodes("elasticd/(checkpoint/(?!client)|daemon|etcd|torchrun)"):
        match node:
            case ast.Call(func=ast.Attribute(attr="decode"), keywords=[ast.keyword(arg="type", value=kind)]):
                found += [] if ast.unparse(kind) == "dict" else [place]
    assert not found, "have a Decoder in the module"
