"""A Dockerfile taken apart, and carried out without Docker: each stage a directory, each RUN a chroot.

Carries out what ours says, and refuses what it does not know. The base image's place is taken by a root that
debootstrap makes, with this machine's Python in /usr/local, as in the image.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

STEP_S = 900
PACKAGES = "ca-certificates,libbz2-1.0,libffi8,liblzma5,libncursesw6,libreadline8,libsqlite3-0,libssl3,zlib1g"


@dataclass(frozen=True)
class Step:
    word: str
    rest: str
    line: int


@dataclass
class Stage:
    """``image`` is what it starts from, its arguments filled in."""

    image: str
    name: str
    steps: list[Step] = field(default_factory=list)


def steps_of(text: str) -> Iterator[Step]:
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        start, joined = at + 1, ""
        while at < len(lines):
            line = lines[at]
            at += 1
            if joined and line.lstrip().startswith("#"):
                continue
            if not line.endswith("\\"):
                joined += line
                break
            joined += line[:-1]
        stripped = joined.strip()
        if stripped and not stripped.startswith("#"):
            word, _, rest = stripped.partition(" ")
            yield Step(word.upper(), rest.strip(), start)


def stages_of(text: str) -> list[Stage]:
    stages: list[Stage] = []
    arguments: dict[str, str] = {}
    for step in steps_of(text):
        if step.word == "FROM":
            image, _, name = filled(step.rest, arguments).partition(" AS ")
            stages.append(Stage(image, name))
        elif stages:
            stages[-1].steps.append(step)
        else:
            assert step.word == "ARG", f"line {step.line}: {step.word} before the first FROM"
            name, _, value = step.rest.partition("=")
            arguments[name] = value
    return stages


def filled(text: str, variables: Mapping[str, str]) -> str:
    return re.sub(r"\$\{?(\w+)\}?", lambda m: variables.get(m.group(1), ""), text)


def assignments(rest: str) -> dict[str, str]:
    return dict(part.split("=", 1) for part in shlex.split(rest))


@dataclass
class Image:
    """What a stage leaves: its files, and how its processes start."""

    root: Path
    env: dict[str, str]
    user: str = "0:0"
    workdir: str = "/"
    entrypoint: list[str] = field(default_factory=list)

    def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        binds: Sequence[Path] = (),
        read_only: bool = False,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """In there, as its user and as process 1, with nothing of this machine's environment."""
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
        if read_only:  # but for its own folder, which is a volume then
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
    """A clean Debian with this machine's Python, as the base image is."""
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
    image = Image(root, {"PATH": "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"})
    image.run(["ldconfig"])
    image.run(["python", "-m", "ensurepip"])
    (root / "usr/local/bin/pip").symlink_to("pip3")
    # What the image brings beside pip is not there to be uninstalled: pip says so, and goes on.
    return root


def build(
    text: str, context: Path, folder: Path, arguments: Mapping[str, str], *, env: Mapping[str, str],
    binds: Sequence[Path],
) -> Image:  # fmt: skip
    """``env`` and ``binds``: how pip reaches its index from here, which no image keeps."""
    clean = base_root(folder)
    made: dict[str, Image] = {}
    image = Image(clean, {})
    for number, stage in enumerate(stages_of(text)):
        root = folder / f"stage{number}"
        subprocess.run(["cp", "-a", "--reflink=auto", str(clean), str(root)], check=True)
        image = Image(root, {"PATH": "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"})
        told: dict[str, str] = {}
        for step in stage.steps:
            print(f"line {step.line}: {step.word} {step.rest[:90]}", flush=True)
            _carry_out(step, image, context, made, told, arguments, env, binds)
        if stage.name:
            made[stage.name] = image
    return image


def _carry_out(
    step: Step, image: Image, context: Path, made: Mapping[str, Image], told: dict[str, str],
    arguments: Mapping[str, str], env: Mapping[str, str], binds: Sequence[Path],
) -> None:  # fmt: skip
    match step.word:
        case "ARG":
            name, _, value = step.rest.partition("=")
            told[name] = arguments.get(name, value.strip('"'))
        case "ENV":
            image.env |= {k: filled(v, {**told, **image.env}) for k, v in assignments(step.rest).items()}
        case "WORKDIR":
            image.workdir = step.rest
            (image.root / step.rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
        case "COPY":
            _copy(step.rest, image, context, made)
        case "RUN":
            done = image.run(["/bin/sh", "-c", step.rest], env={**env, **told}, binds=binds)
            print(done.stdout[-300:], done.stderr[-300:])
        case "USER":
            image.user = step.rest
        case "ENTRYPOINT":
            image.entrypoint = json.loads(step.rest)
        case "LABEL" | "EXPOSE" | "CMD":
            pass
        case other:
            raise AssertionError(f"line {step.line}: {other} cannot be carried out here")


def _copy(rest: str, image: Image, context: Path, made: Mapping[str, Image]) -> None:
    words = rest.split()
    origin = context
    if words[0].startswith("--from="):
        origin = made[words.pop(0).removeprefix("--from=")].root
    *sources, target = words
    place = image.root / (target if target.startswith("/") else f"{image.workdir}/{target}").lstrip("/")
    for source in sources:
        path = origin / source.lstrip("/")
        if path.is_dir():
            skip = shutil.ignore_patterns("__pycache__") if origin == context else None
            shutil.copytree(path, place, symlinks=True, dirs_exist_ok=True, ignore=skip)
        else:
            to = place / path.name if target.endswith("/") else place
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, to)


def may_build() -> str:
    """Why it cannot be done here, or empty."""
    if os.geteuid() != 0:
        return "a chroot needs root"
    if shutil.which("debootstrap") is None:
        return "debootstrap is not installed"
    if subprocess.run(["unshare", "--mount", "--pid", "--fork", "true"], capture_output=True).returncode:
        return "namespaces may not be made here"
    return ""
