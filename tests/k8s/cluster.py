"""The part of Kubernetes that the rehearsal needs, in one thread: it starts, probes, stops and replaces
pods as their manifests say. Time passes only in ``until``."""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from elasticd.etcd.embedded import find_etcd
from tests.k8s import pod as pods_
from tests.k8s.manifests import Object, Pods, of_kind, pods
from tests.k8s.network import Network
from tests.k8s.pod import Places, Pod

PATIENCE_S = 100.0


@dataclass
class Controller:
    """Keeps the pods of one Job or StatefulSet: ``wanted`` of them, one for each index."""

    cluster: Cluster
    manifest: Object
    made: Pods
    wanted: int
    pods: dict[int, Pod] = field(default_factory=dict)
    started: int = 0
    succeeded: set[int] = field(default_factory=set)
    failed: str = ""
    counted: int = 0  # failures that a Job counts
    held: set[int] = field(default_factory=set)  # indices for which there is no machine at present

    @property
    def name(self) -> str:
        return self.made.name

    @property
    def is_job(self) -> bool:
        return self.made.kind == "Job"

    def set_env(self, name: str, value: str) -> None:
        """Act as ``kubectl set env``: make a new template, whose pods replace the present ones."""
        container = {**self.made.container, "env": [dict(e) for e in self.made.container["env"]]}
        (entry,) = [e for e in container["env"] if e["name"] == name]
        entry["value"] = value
        self.made = replace(self.made, spec={**self.made.spec, "containers": [container]})

    def restart(self) -> None:
        """Act as ``kubectl rollout restart``: make a new template without a real difference."""
        self.made = replace(self.made)

    @property
    def settled(self) -> bool:
        """Whether all pods are there and ready, from the newest template."""
        here = self.pods.values()
        return len(here) == self.wanted and all(one.made is self.made and one.ready for one in here)

    def reconcile(self) -> None:
        """Start pods that are missing. Delete pods that are too many, or of an old template."""
        over = bool(self.failed or self.succeeded) and self.is_job
        for index, one in list(self.pods.items()):
            if index >= self.wanted or over:
                self.cluster.delete(one)
        for index in range(0 if over else self.wanted):
            if index not in self.pods and index not in self.held:
                self.pods[index] = self._start(index)
        if not self.is_job:
            self._roll()

    def _roll(self) -> None:
        """Replace pods as a StatefulSet does: the last one first, and each once the pods after it are
        ready."""
        assert self.manifest["spec"].get("updateStrategy", {}).get("type", "RollingUpdate") == "RollingUpdate"
        for index in reversed(range(self.wanted)):
            one = self.pods.get(index)
            if one is not None and one.made is not self.made:
                self.cluster.delete(one)
            if one is None or not one.ready:
                return

    def _start(self, index: int) -> Pod:
        self.started += 1
        suffix = f"-{self.started:05d}" if self.is_job else ""
        name = f"{self.name}-{index}{suffix}"
        return self.cluster.start(self, name, index, self.made.facts(name, index))

    def ended(self, one: Pod) -> None:
        assert one.code is not None
        if self.pods.get(one.index) is one:
            del self.pods[one.index]
        if not self.is_job:
            return
        if one.code == 0:
            self.succeeded.add(one.index)
        elif one.index < self.wanted:
            self._judge(one, one.code)

    def _judge(self, one: Pod, code: int) -> None:
        """Apply the first rule of the podFailurePolicy that fits; without one, count the failure."""
        for rule in self.manifest["spec"]["podFailurePolicy"]["rules"]:
            if "onPodConditions" in rule:
                fits = one.disrupted and "DisruptionTarget" in {c["type"] for c in rule["onPodConditions"]}
            else:
                assert rule["onExitCodes"]["containerName"] == one.made.container["name"]
                fits = code in rule["onExitCodes"]["values"]
            if fits:
                if rule["action"] == "FailJob":
                    self.failed = f"{one.name} ended with {code}"
                return
        self.counted += 1


class Cluster:
    """Does on this machine what ``kubectl apply`` does with these objects."""

    def __init__(
        self,
        folder: Path,
        objects: tuple[Object, ...],
        secrets: Mapping[str, Path],
        *,
        own_names: bool = True,
    ) -> None:
        folder.mkdir()
        folder.chmod(0o755)
        self.network = Network()
        self.selector = selectors.DefaultSelector()
        self.all: list[Pod] = []
        self.history: list[tuple[Pod, str]] = []  # every line that any pod has written, in order
        self._timers: list[tuple[float, Callable[[], None]]] = []
        (folder / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
        programs = f"{find_etcd().parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        self._places = Places(folder, folder / "resolv.conf", own_names, secrets, programs)
        self._claims = folder / "claims"
        self._claims.mkdir()
        manifests = {(o["kind"], o["metadata"]["name"]): o for o in objects}
        self.controllers = {
            made.name: Controller(self, manifests[made.kind, made.name], made, made.count)
            for made in pods(objects)
        }
        self._services = of_kind(objects, "Service")

    # ------------------------------------------------------------ what people and machines do

    def scale(self, name: str, wanted: int) -> None:
        self.controllers[name].wanted = wanted

    def delete(self, one: Pod) -> None:
        """Delete the pod: SIGTERM, and SIGKILL when the grace period is over."""
        if one.deleted or one.code is not None:
            return
        one.deleted = True
        one.signal(signal.SIGTERM)
        grace_s = one.made.spec.get("terminationGracePeriodSeconds", 30)
        self._after(grace_s, lambda: self._too_late(one, grace_s))

    def _too_late(self, one: Pod, grace_s: float) -> None:
        if one.code is None:
            one.lines.append(f"killed: not gone within its grace period of {grace_s} s")
            one.signal(signal.SIGKILL)

    def evict(self, one: Pod) -> None:
        one.disrupted = True
        self.delete(one)

    def lose(self, one: Pod) -> None:
        """Lose the pod's machine, without notice."""
        one.disrupted = True  # as the garbage collector of pods marks it
        one.signal(signal.SIGKILL)

    def forget(self, claim_of: Pod) -> None:
        """Lose the disk of a pod that has ended as well."""
        assert claim_of.code is not None
        for folder in self._claims.glob(f"*-{claim_of.name}"):
            shutil.rmtree(folder)

    # ------------------------------------------------------------ time

    def until(self, holds: Callable[[], bool], what: str) -> None:
        """Let the cluster run until something holds."""
        deadline = time.monotonic() + PATIENCE_S
        for controller in self.controllers.values():
            controller.reconcile()
        while not holds():
            assert time.monotonic() < deadline, f"not within {PATIENCE_S:g} s: {what}\n{self.state()}"
            next_timer = min((at for at, _ in self._timers), default=deadline)
            for key, _ in self.selector.select(max(0.0, min(deadline, next_timer) - time.monotonic())):
                key.data()
            now = time.monotonic()
            due = [call for at, call in self._timers if at <= now]
            self._timers = [(at, call) for at, call in self._timers if at > now]
            for call in due:
                call()
            for controller in self.controllers.values():
                controller.reconcile()

    def _after(self, seconds: float, call: Callable[[], None]) -> None:
        self._timers.append((time.monotonic() + seconds, call))

    # ------------------------------------------------------------ pods

    def start(self, owner: Controller, name: str, index: int, facts: Mapping[str, str]) -> Pod:
        templates = owner.manifest["spec"].get("volumeClaimTemplates", ())
        claims = {c["metadata"]["name"]: self._claims / f"{c['metadata']['name']}-{name}" for c in templates}
        while (self._places.folder / name).exists():  # a pod of a StatefulSet has the name of its predecessor
            (self._places.folder / name).rename(self._places.folder / f"{name}.{len(self.all)}")
        one = pods_.start(name, index, owner.made, facts, self.network, self._places, claims)
        self.all.append(one)
        self._name_pods()
        assert one.process.stdout is not None
        os.set_blocking(one.process.stdout.fileno(), False)
        self.selector.register(one.process.stdout, selectors.EVENT_READ, lambda: self._read(owner, one))
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            if kind in one.made.container:
                self._after(0.2, Probe(self, one, kind).ask)
        return one

    def _read(self, owner: Controller, one: Pod) -> None:
        assert one.process.stdout is not None
        data = one.process.stdout.read(1 << 16)
        if data is None:
            return
        *lines, one.begun = (one.begun + data).split(b"\n")
        said = [line.decode(errors="replace") for line in lines]
        one.lines += said
        self.history += [(one, line) for line in said]
        if not data:  # all its processes have ended, and the last of them was process 1
            self.selector.unregister(one.process.stdout)
            one.process.stdout.close()
            one.code = pods_.exit_code(one.process.wait())
            one.ready = False
            self._name_pods()
            owner.ended(one)

    def _name_pods(self) -> None:
        """Give all pods the names of the cluster's DNS: those that headless Services give their pods."""
        lines = []
        for service in self._services:
            domain = service["metadata"]["name"]
            for one in self.here():
                if one.made.labels.items() >= service["spec"]["selector"].items():
                    hostname = one.name if one.made.kind == "StatefulSet" else f"{one.made.name}-{one.index}"
                    lines.append(f"{one.address} {hostname}.{domain} {domain}")
        for one in self.here():
            one.names(lines)

    def here(self) -> list[Pod]:
        return [one for one in self.all if one.code is None]

    def of(self, name: str) -> list[Pod]:
        """Return the present pods of a Job or StatefulSet, by index."""
        found = [one for one in self.here() if one.made.name == name]
        return sorted(found, key=lambda one: one.index)

    def lines(self, name: str) -> Iterable[str]:
        return (line for one, line in self.history if one.made.name == name)

    def state(self) -> str:
        return "\n".join(f"--- {one!r}\n" + "\n".join(one.lines[-25:]) for one in self.all)

    def close(self) -> None:
        """End everything that still runs, as a power cut would. Check that nothing is left."""
        for one in self.here():
            one.signal(signal.SIGKILL)
        for one in self.all:
            os.close(one.pidfd)
            # process 1 ends after all others of its namespace, and this process after process 1
            one.process.wait()
            if one.process.stdout is not None:
                one.process.stdout.close()
        for key in list(self.selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self.selector.close()
        self.network.close()
        assert not (left := [one for one in self.all if os.path.exists(f"/proc/{one.pid}")]), left


class Probe:
    """One of a container's httpGet probes, sent again and again as the manifest says."""

    def __init__(self, cluster: Cluster, one: Pod, kind: str) -> None:
        self._cluster, self._pod, self._kind = cluster, one, kind
        self._told = one.made.container[kind]
        self._misses = 0
        self._socket: socket.socket | None = None
        self._heard = b""

    def ask(self) -> None:
        one = self._pod
        if one.code is not None:
            return
        if self._kind != "startupProbe" and "startupProbe" in one.made.container and not one.started:
            self._again(0.2)
            return
        ports = {p["name"]: p["containerPort"] for p in one.made.container["ports"]}
        sock = self._socket = self._cluster.network.socket()
        sock.setblocking(False)
        sock.connect_ex((one.address, ports[self._told["httpGet"]["port"]]))
        self._heard = b""
        self._cluster.selector.register(sock, selectors.EVENT_WRITE, self._connected)
        self._cluster._after(self._told.get("timeoutSeconds", 1), lambda: self._done(sock, False))

    def _connected(self) -> None:
        assert self._socket is not None
        lines = (
            f"GET {self._told['httpGet']['path']} HTTP/1.1",
            f"Host: {self._pod.address}",
            "Connection: close",
        )
        try:
            self._socket.send("\r\n".join([*lines, "", ""]).encode())
        except OSError:
            self._done(self._socket, False)
            return
        self._cluster.selector.modify(self._socket, selectors.EVENT_READ, self._answered)

    def _answered(self) -> None:
        assert self._socket is not None
        try:
            data = self._socket.recv(1 << 16)
        except OSError:
            data = b""
        self._heard += data
        if b"\r\n" in self._heard or not data:
            status = self._heard.split(b" ", 2)[1:2]
            self._done(self._socket, bool(status) and 200 <= int(status[0]) < 400)

    def _done(self, asked: socket.socket, good: bool) -> None:
        if self._socket is not asked:
            return  # the answer came long ago
        self._cluster.selector.unregister(asked)
        asked.close()
        self._socket = None
        one = self._pod
        self._misses = 0 if good else self._misses + 1
        too_many = self._misses >= self._told.get("failureThreshold", 3)
        if self._kind == "readinessProbe":
            one.ready = good or (one.ready and not too_many)
        elif self._kind == "startupProbe" and good:
            one.started = True
            return
        elif too_many and not one.deleted:
            one.lines.append(f"killed: its {self._kind} failed {self._misses} times")
            self._cluster.delete(one)
        period_s = self._told.get("periodSeconds", 10)
        self._again(
            period_s if one.ready or self._kind != "readinessProbe" else 0.5
        )  # sooner than Kubernetes would

    def _again(self, seconds: float) -> None:
        self._cluster._after(seconds, self.ask)
