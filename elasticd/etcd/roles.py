"""Roles and users of an etcd with authentication, managed by its root user."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from google.protobuf import message_factory

from elasticd.etcd._client3 import rpc
from elasticd.etcd.access import EtcdAccess
from elasticd.etcd.connection import Connection
from elasticd.etcd.errors import NoLogins, NoSuchName, StoreRefused
from elasticd.etcd.kv import prefix_end

_REQUEST: Any = rpc.AuthRoleGrantPermissionRequest.DESCRIPTOR.fields_by_name["perm"].message_type
_KINDS: Any = _REQUEST.fields_by_name["permType"].enum_type
_Permission: Any = message_factory.GetMessageClass(_REQUEST)


@dataclass(frozen=True, slots=True)
class Permission:
    """A permission of a role: "read", "write" or "readwrite", on the keys from ``key`` to ``end`` (empty: on
    that key only)."""

    kind: str
    key: bytes
    end: bytes


def all_below(prefix: str) -> Permission:
    return Permission("readwrite", prefix.encode(), prefix_end(prefix.encode()))


class Roles:
    """Calls that block until etcd responds. They raise StoreError, and StoreRefused unless the user is root.
    Use as a context manager."""

    def __init__(self, access: EtcdAccess) -> None:
        self._connection = Connection(access)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def requires_login(self) -> bool:
        """Return whether authentication is enabled; without it, roles have no effect. Needs no permission."""
        try:
            self.accepts_password("root", "")
        except NoLogins:
            return False
        return True

    def accepts_password(self, user: str, password: str) -> bool:
        """Return whether the user can log in with that password. Raises NoLogins."""
        try:
            self._call("authenticate", rpc.AuthenticateRequest(name=user, password=password))
        except NoLogins:
            raise
        except StoreRefused:
            return False
        return True

    # ---- roles

    def permissions_of(self, role: str) -> tuple[Permission, ...] | None:
        """Return the role's permissions; None if there is no such role."""
        try:
            found = self._call("get_role", rpc.AuthRoleGetRequest(role=role)).perm
        except NoSuchName:
            return None
        kinds = {value.number: value.name.lower() for value in _KINDS.values}
        return tuple(Permission(kinds[p.permType], p.key, p.range_end) for p in found)

    def add_role(self, role: str) -> None:
        self._call("add_role", rpc.AuthRoleAddRequest(name=role))

    def add_permission(self, role: str, permission: Permission) -> None:
        kind = _KINDS.values_by_name[permission.kind.upper()].number
        allowed = _Permission(permType=kind, key=permission.key, range_end=permission.end)
        self._call("grant_permission", rpc.AuthRoleGrantPermissionRequest(name=role, perm=allowed))

    def delete_role(self, role: str) -> None:
        """Delete the role, and take it from all users."""
        self._call("delete_role", rpc.AuthRoleDeleteRequest(role=role))

    # ---- users

    def roles_of(self, user: str) -> tuple[str, ...] | None:
        """Return the user's roles; None if there is no such user."""
        try:
            return tuple(self._call("get_user", rpc.AuthUserGetRequest(name=user)).roles)
        except NoSuchName:
            return None

    def add_user(self, user: str, password: str | None) -> None:
        """Add a user. A user without a password can log in only with a certificate of that common name."""
        request = rpc.AuthUserAddRequest(name=user, password=password or "")
        request.options.no_password = password is None
        self._call("add_user", request)

    def set_password(self, user: str, password: str) -> None:
        """Change the password. Has no effect on a user that was added without a password: check with
        ``accepts_password``."""
        self._call("change_password", rpc.AuthUserChangePasswordRequest(name=user, password=password))

    def grant(self, user: str, role: str) -> None:
        self._call("grant_role", rpc.AuthUserGrantRoleRequest(user=user, role=role))

    def revoke(self, user: str, role: str) -> None:
        self._call("revoke_role", rpc.AuthUserRevokeRoleRequest(name=user, role=role))

    def delete_user(self, user: str) -> None:
        self._call("delete_user", rpc.AuthUserDeleteRequest(name=user))

    def _call(self, method: str, request: Any) -> Any:
        reads = method in ("authenticate", "get_role", "get_user")
        return self._connection.call(method, request, idempotent=reads)
