"""Builds the Dockerfile with buildah, which needs no daemon and no registry: each RUN is a chroot.

In place of the base image there is a root that debootstrap makes, with this machine's Python in /usr/local,
as in the base image.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

STEP_S = 900
BUILD_S = 3600
PACKAGES = "ca-certificates,libbz2-1.0,libffi8,liblzma5,libncursesw6,libreadline8,libsqlite3-0,libssl3,zlib1g"
PATH = "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class Image:
    """The files of an image, and how its processes start."""

    root: Path
    env: dict[str, str]
    user: str = "0:0"
    workdir: str = "/"
    entrypoint: list[str] = field(default_factory=list)
    labels: dict[str, str] = field(default_factory=dict)

    def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        binds: Sequence[Path] = (),
        read_only: bool = False,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the image, as its user and as process 1, without this machine's environment."""
        root = shlex.quote(str(self.root))
        mounts = [f"mount --rbind {root} {root}", f"mount -t proc proc {root}/proc"]
        mounts += [f"mount -t tmpfs -o mode=755 tmpfs {root}/dev", f"mkdir {root}/dev/shm"]
        mounts += [f"mount -t tmpfs -o mode=1777,size=512m tmpfs {root}/dev/shm"]
        mounts += [f"mount -t tmpfs -o mode=1777 tmpfs {root}/tmp"]
        for device in ("null", "zero", "random", "urandom"):
            mounts += [f"touch {root}/dev/{device}", f"mount --bind /dev/{device} {root}/dev/{device}"]
        for path in binds:
            inside = shlex.quote(f"{self.root}{path}")
            make = f"mkdir -p {inside}" if path.is_dir() else f"mkdir -p $(dirname {inside}); touch {inside}"
            mounts += [make, f"mount --bind {shlex.quote(str(path))} {inside}"]
        if read_only:  # except its own folder, which is a volume then
            uid = self.user.partition(":")[0]
            mounts += [f"mount -t tmpfs -o mode=700,uid={uid} tmpfs {root}{shlex.quote(self.workdir)}"]
            mounts += [f"mount -o remount,ro,bind {root}"]
        uid, _, gid = self.user.partition(":")
        inner = f'cd {shlex.quote(self.workdir)} && exec "$@"'
        variables = [f"{name}={value}" for name, value in {**self.env, **(env or {})}.items()]
        line = [
            "chroot",
            f"--userspec={uid}:{gid}",
            "--groups=",
            str(self.root),
            "/usr/bin/env",
            "-i",
            *variables,
        ]
        outer = "set -e; " + "; ".join(mounts) + '; exec "$@"'
        done = subprocess.run(
            ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", outer, "sh", *line,
             "/bin/sh", "-c", inner, "sh", *argv],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=STEP_S,
        )  # fmt: skip
        assert not check or done.returncode == 0, f"{argv}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done


def base_root(folder: Path) -> Path:
    """Return a clean Debian with this machine's Python, as in the base image."""
    root = folder / "base"
    subprocess.run(
        ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(root)],
        check=True, capture_output=True, timeout=STEP_S,
    )  # fmt: skip
    python = Path(sys.base_prefix)
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    left_out = shutil.ignore_patterns("site-packages", "test", "__pycache__", "config-*", "*.a")
    shutil.copytree(python / "lib" / name, root / "usr/local/lib" / name, symlinks=True, ignore=left_out)
    for library in (python / "lib").glob("libpython*.so*"):
        shutil.copy2(library, root / "usr/local/lib", follow_symlinks=False)
    shutil.copy2((python / "bin" / name).resolve(), root / "usr/local/bin" / name)
    for link in ("python", "python3"):
        (root / "usr/local/bin" / link).symlink_to(name)
    image = Image(root, {"PATH": PATH})
    image.run(["ldconfig"])
    image.run(["python", "-m", "ensurepip"])
    (root / "usr/local/bin/pip").symlink_to("pip3")
    # The image cannot uninstall what it has beside pip. pip says so, and continues.
    return root


class Builder:
    """buildah, with a storage of its own in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._own = ("--root", folder / "storage", "--runroot", folder / "run", "--storage-driver", "overlay")

    def build(
        self, dockerfile: Path, context: Path, arguments: Mapping[str, str], binds: Mapping[Path, Path]
    ) -> Image:
        """Build the image. ``binds``: files and folders of this machine, by their places in each RUN. The
        image does not keep them."""
        base = self._told("from", "scratch")
        self._told("copy", "--quiet", base, base_root(self._folder), "/")
        self._told("config", f"--env=PATH={PATH}", base)
        self._told("commit", "--quiet", "--rm", base, "localhost/base")
        words = [f"--build-arg={name}={value}" for name, value in arguments.items()]
        words += [f"--volume={here}:{there}:ro" for there, here in binds.items()]
        words += ["--isolation=chroot", f"--ignorefile={dockerfile}.dockerignore", f"--file={dockerfile}"]
        words += ["--build-arg=PYTHON=localhost/base", "--tag=localhost/built"]
        self._told("build", *words, context, within_s=BUILD_S)
        made = self._told("from", "localhost/built")
        config = json.loads(self._told("inspect", made))["OCIv1"]["config"]
        return Image(
            Path(self._told("mount", made)),
            dict(variable.split("=", 1) for variable in config["Env"]),
            config["User"],
            config["WorkingDir"],
            config["Entrypoint"],
            config["Labels"],
        )

    def close(self) -> None:
        self._told("rm", "--all")
        shutil.rmtree(self._folder)

    def _told(self, *words: str | Path, within_s: float = STEP_S) -> str:
        command = ["buildah", *self._own, *words]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=within_s)
        assert done.returncode == 0, (
            f"{command}: {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        )
        return done.stdout.strip()


def may_build() -> str:
    """Return why images cannot be built here; empty if they can."""
    if os.geteuid() != 0:
        return "a chroot needs root"
    for program in ("buildah", "debootstrap"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    if subprocess.run(["unshare", "--mount", "--pid", "--fork", "true"], capture_output=True).returncode:
        return "namespaces may not be made here"
    return ""
