"""The only module that uses the etcd3 package.

etcd3 0.12 is old. Its messages were generated for protobuf 3, and cannot be imported with protobuf 4 or later
("Descriptors cannot be created directly"). This module therefore rebuilds the messages in a private pool,
from the descriptors in etcd3's files, before it imports etcd3. The client of etcd3 neither reconnects nor
sets timeouts, so elasticd uses only its messages and gRPC stubs, in ``elasticd.etcd.connection``.

The module adds three parts of the protocol that are newer than etcd3's copy of 2018 (all in etcd since 3.4):
progress requests of a watch, users without a password, and ``LeaseKeepAlive`` as a plain call. (A
bidirectional stream with one request and one response has the same bytes as a call; etcd ends the stream when
the client does.)
"""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_FILES = ("kv_pb2", "auth_pb2", "rpc_pb2")  # in order of dependency
_lock = threading.Lock()


def _serialized_descriptor(path: Path) -> bytes:
    """Return the ``serialized_pb`` literal of a generated module, without running the module."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.keyword) and node.arg == "serialized_pb":
            value = node.value
            literal = ast.literal_eval(value.args[0] if isinstance(value, ast.Call) else value)
            return literal.encode("latin1") if isinstance(literal, str) else bytes(literal)
    raise ImportError(f"{path} holds no protobuf descriptor; is it really etcd3 0.12?")


def _with_progress_request(file: descriptor_pb2.FileDescriptorProto) -> None:
    request = next(m for m in file.message_type if m.name == "WatchRequest")
    if any(f.name == "progress_request" for f in request.field):
        return
    file.message_type.add(name="WatchProgressRequest")
    request.field.add(
        name="progress_request",
        number=3,
        type=descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE,
        label=descriptor_pb2.FieldDescriptorProto.LABEL_OPTIONAL,
        type_name=".etcdserverpb.WatchProgressRequest",
        oneof_index=0,
    )


def _with_users_without_password(file: descriptor_pb2.FileDescriptorProto) -> None:
    request = next(m for m in file.message_type if m.name == "AuthUserAddRequest")
    if any(f.name == "options" for f in request.field):
        return
    optional = descriptor_pb2.FieldDescriptorProto.LABEL_OPTIONAL
    options = file.message_type.add(name="UserAddOptions")
    boolean = descriptor_pb2.FieldDescriptorProto.TYPE_BOOL
    options.field.add(name="no_password", number=1, type=boolean, label=optional)
    message = descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE
    of = ".etcdserverpb.UserAddOptions"
    request.field.add(name="options", number=3, type=message, label=optional, type_name=of)


def _message_modules(folder: Path) -> dict[str, ModuleType]:
    pool = descriptor_pool.DescriptorPool()
    modules = {}
    for name in _FILES:
        proto = descriptor_pb2.FileDescriptorProto.FromString(_serialized_descriptor(folder / f"{name}.py"))
        if name == "rpc_pb2":
            _with_progress_request(proto)
            _with_users_without_password(proto)
        pool.AddSerializedFile(proto.SerializeToString())
        file = pool.FindFileByName(proto.name)
        module = ModuleType(f"etcd3.etcdrpc.{name}")
        for message, descriptor in file.message_types_by_name.items():
            setattr(module, message, message_factory.GetMessageClass(descriptor))
        for enum in file.enum_types_by_name.values():
            for value in enum.values:
                setattr(module, value.name, value.number)
        modules[module.__name__] = module
    return modules


def _import_etcd3() -> ModuleType:
    """Import etcd3.etcdrpc. A failure leaves ``sys.modules`` unchanged."""
    with _lock:
        if "etcd3.etcdrpc" not in sys.modules:
            spec = importlib.util.find_spec("etcd3")
            if spec is None or not spec.submodule_search_locations:
                raise ImportError(
                    "the package etcd3 is not installed; elasticd cannot talk to etcd without it"
                )
            modules = _message_modules(Path(spec.submodule_search_locations[0]) / "etcdrpc")
            sys.modules.update(modules)
            try:
                import etcd3  # noqa: F401
            except BaseException:
                for name in [n for n in sys.modules if n == "etcd3" or n.startswith("etcd3.")]:
                    del sys.modules[name]
                raise
        return sys.modules["etcd3.etcdrpc"]


def _import_grpc() -> ModuleType:
    """Import grpc with its log on stderr disabled: grpc logs every failed connection, and elasticd reports
    them itself."""
    quiet = "GRPC_VERBOSITY" not in os.environ and "grpc" not in sys.modules
    if quiet:
        os.environ["GRPC_VERBOSITY"] = "NONE"
    try:
        import grpc
        from grpc._cython import cygrpc  # noqa: F401  (reads the variable)
    finally:
        if quiet:  # undo the change, since workers inherit the environment and may use grpc
            del os.environ["GRPC_VERBOSITY"]
    return grpc  # type: ignore[no-any-return]


grpc: Any = _import_grpc()
rpc: Any = _import_etcd3()


class Stubs:
    """The etcd calls that elasticd uses, on one channel."""

    def __init__(self, channel: Any) -> None:
        kv, lease = rpc.KVStub(channel), rpc.LeaseStub(channel)
        self.range = kv.Range
        self.txn = kv.Txn
        self.delete = kv.DeleteRange
        self.grant = lease.LeaseGrant
        self.revoke = lease.LeaseRevoke
        self.keep_alive = channel.unary_unary(
            "/etcdserverpb.Lease/LeaseKeepAlive",
            request_serializer=rpc.LeaseKeepAliveRequest.SerializeToString,
            response_deserializer=rpc.LeaseKeepAliveResponse.FromString,
        )
        self.watch = rpc.WatchStub(channel).Watch
        self.status = rpc.MaintenanceStub(channel).Status
        self.alarm = rpc.MaintenanceStub(channel).Alarm
        auth = rpc.AuthStub(channel)
        self.authenticate = auth.Authenticate
        self.add_user, self.get_user, self.delete_user = auth.UserAdd, auth.UserGet, auth.UserDelete
        self.change_password = auth.UserChangePassword
        self.grant_role, self.revoke_role = auth.UserGrantRole, auth.UserRevokeRole
        self.add_role, self.get_role, self.delete_role = auth.RoleAdd, auth.RoleGet, auth.RoleDelete
        self.grant_permission = auth.RoleGrantPermission
