"""A pod: a container in namespaces of its own, made from its manifest alone."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.k8s.manifests import ROOT, Object, Pods, quantity
from tests.k8s.network import UNDER_US, Network

PROGRAM = Path(__file__).parent / "programs" / "container.py"


@dataclass(frozen=True)
class Places:
    """Where files lie on this machine that pods get. ``own_names``: whether a pod's own name resolves, as it
    does except in a host's network."""

    folder: Path
    resolver: Path
    own_names: bool
    secrets: Mapping[str, Path]
    path: str  # folders of programs, as in the image


@dataclass
class Pod:
    name: str
    index: int
    made: Pods
    address: str
    folder: Path
    env: Mapping[str, str]
    own_names: list[str]  # the lines that the kubelet writes into the pod's /etc/hosts
    process: subprocess.Popen[bytes]
    pid: int  # the pid of its process 1, seen from here
    pidfd: int  # a pidfd of the same process
    lines: list[str] = field(default_factory=list)
    begun: bytes = b""  # the number of the next line to read
    deleted: bool = False
    disrupted: bool = False
    ready: bool = False
    started: bool = False
    code: int | None = None

    def __repr__(self) -> str:
        return f"<{self.name} {self.address} {'gone' if self.code is not None else 'here'}: {self.code}>"

    def signal(self, number: int) -> None:
        """Send a signal to process 1, unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def execute(self, *argv: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the pod, as ``kubectl exec`` does."""
        inside = ["nsenter", "-t", str(self.pid), "-a", "--root"]
        into_root = ["sh", "-c", 'cd / && exec "$0" "$@"']  # nsenter leaves this to the process inside
        command = [*inside, *setpriv(self.made.spec), "--", *into_root, *argv]
        return subprocess.run(command, env=dict(self.env), capture_output=True, text=True, timeout=60)

    def names(self, known: list[str]) -> None:
        """Stand in for the cluster's DNS: add these lines to the pod's own /etc/hosts."""
        (self.folder / "hosts").write_text("\n".join([*self.own_names, *known]) + "\n")

    def workers(self) -> list[int]:
        """Return the training processes inside, by this machine's pids."""
        space = os.readlink(f"/proc/{self.pid}/ns/pid")
        found = []
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if folder.name.isdecimal() and os.readlink(folder / "ns" / "pid") == space:
                    environ = (folder / "environ").read_bytes().split(b"\0")
                    if any(entry.startswith(b"RANK=") for entry in environ):
                        found.append(int(folder.name))
        return found

    @property
    def last_words(self) -> str:
        """Return what ``kubectl describe`` shows."""
        return (self.folder / "termination-log").read_text()

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the events of this name that the pod has logged."""
        found = [json.loads(line) for line in self.lines if line.startswith("{")]
        return [event for event in found if event.get("event") == name]


def start(
    name: str,
    index: int,
    made: Pods,
    facts: Mapping[str, str],
    network: Network,
    places: Places,
    claims: Mapping[str, Path],
) -> Pod:
    """Start process 1. ``claims``: the volumes that outlive the pod."""
    address = network.next_address()
    folder = places.folder / name
    (folder / "root").mkdir(parents=True)
    own_names = ["127.0.0.1 localhost", *([f"{address} {name}"] if places.own_names else [])]
    (folder / "hosts").write_text("\n".join(own_names) + "\n")
    (folder / "termination-log").touch(0o666)
    (folder / "termination-log").chmod(0o666)
    env = {"PATH": places.path, "LANG": "C.UTF-8"} | made.env({**facts, "status.podIP": address})
    binds: list[tuple[str, str, bool]] = [
        (str(folder / "hosts"), "/etc/hosts", True),
        (str(places.resolver), "/etc/resolv.conf", True),
        (str(ROOT), "/opt/elasticd", True),
    ]
    memory = []
    volumes = {v["name"]: v for v in made.spec.get("volumes", ())}
    owner = made.spec["securityContext"]["fsGroup"]
    for mount in made.container["volumeMounts"]:
        target, readonly = mount["mountPath"], bool(mount.get("readOnly"))
        volume = volumes.get(mount["name"], {})
        if volume.get("emptyDir", {}).get("medium") == "Memory":
            size = int(quantity(volume["emptyDir"]["sizeLimit"]))
            memory.append((target, f"size={size},mode=1777"))
            continue
        if "secret" in volume:
            source = _secret(folder, places.secrets[volume["secret"]["secretName"]], volume["secret"], owner)
        else:
            source = claims.get(mount["name"], folder / mount["name"])
            if claim := volume.get("persistentVolumeClaim"):
                # the same folder for all pods that name it
                source = places.folder / "claims" / claim["claimName"]
            source.mkdir(exist_ok=True)
            if source.stat().st_gid != owner:
                os.chown(source, 0, owner)
                source.chmod(0o2770)
        binds.append((str(source), target, readonly))
        for ours in {ROOT, Path(sys.prefix)}:  # a clone under /tmp must be visible through the pod's own /tmp
            if ours.is_relative_to(target):
                (source / ours.relative_to(target)).mkdir(parents=True, exist_ok=True)
                binds.append((str(ours), str(ours), True))
    told = {
        "hostname": name,
        "folder": str(folder / "root"),
        "reachable": reachable(),
        "termination_log": str(folder / "termination-log"),
        "binds": binds,
        "memory": memory,
        "setpriv": setpriv(made.spec),
        "argv": made.argv(env),
        "env": env,
    }
    (folder / "told.json").write_text(json.dumps(told))
    process = subprocess.Popen(
        [*UNDER_US, sys.executable, "-I", "-S", str(PROGRAM), str(folder / "told.json")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdin is not None and process.stdout is not None
    said = process.stdout.readline()
    assert said.strip().isdigit(), said + process.stdout.read()
    pid = int(said)
    pidfd = os.pidfd_open(pid)  # the process cannot have been reaped: it waits for a message of the test
    network.plug(pid, address)
    process.stdin.write(b"go\n")
    process.stdin.close()
    return Pod(name, index, made, address, folder, env, own_names, process, pid, pidfd)


def setpriv(spec: Object) -> list[str]:
    """Return the words that give a command the user and the rights of the security context."""
    own = spec["securityContext"]
    return [
        *(
            "setpriv",
            f"--reuid={own['runAsUser']}",
            f"--regid={own['runAsGroup']}",
            f"--groups={own['fsGroup']}",
        ),
        *("--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"),
    ]


def reachable() -> list[str]:
    """Return the folders of the programs that the image would bring."""
    paths = {str(ROOT), sys.prefix, sys.base_prefix, *sys.path, os.path.realpath(sys.executable)}
    return sorted(path for path in paths if path and os.path.exists(path))


def _secret(folder: Path, files: Path, secret: Object, owner: int) -> Path:
    target = folder / secret["secretName"]
    target.mkdir()
    for file in files.iterdir():
        copy = target / file.name
        copy.write_bytes(file.read_bytes())
        os.chown(copy, 0, owner)
        copy.chmod(secret.get("defaultMode", 0o644))
    os.chown(target, 0, owner)
    target.chmod(0o750)
    return target


def exit_code(status: int) -> int:
    """Return the exit code as the container's runtime reports it."""
    return 128 - status if status < 0 else status


def trained(line: str) -> int | None:
    """Return the step that a worker has reported as made or as resumed."""
    found = re.match(r"(?:\[\w+\]:)?(?:step +(\d+) |resumed after step (\d+) )", line)
    return int(found[1] or found[2]) if found else None


TERM, KILL = signal.SIGTERM, signal.SIGKILL
