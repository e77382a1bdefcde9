"""The unit under a real systemd: that of a user, in a mount namespace that looks like a booted system."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

UNIT = Path(__file__).parents[2] / "deploy" / "systemd" / "elasticd@.service"
ELASTICD = str(Path(sys.executable).with_name("elasticd"))
SYSTEMD = next((p for p in ("/lib/systemd/systemd", "/usr/lib/systemd/systemd") if Path(p).exists()), "")
HIERARCHIES = [Path("/sys/fs/cgroup") / name for name in ("systemd", "unified", "")]
OF_THE_SYSTEM = (
    "User=", "Group=", "StateDirectory", "Protect", "PrivateTmp", "CapabilityBoundingSet", "Wants=", "After=",
    "RestartSec=", "LimitMEMLOCK",
)  # fmt: skip
PATIENCE_S = 100


class Systemd:
    """A systemd whose units are in one folder. ``folder`` must have a short name, as socket paths must."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.units = folder / "systemd" / "user"
        self.units.mkdir(parents=True)
        (folder / "x").mkdir(mode=0o700)
        self.env = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "XDG_CONFIG_HOME": str(folder),
            "XDG_RUNTIME_DIR": str(folder / "x"),
        }
        start = f"mount -t tmpfs tmpfs /run && mkdir -p /run/systemd/system && exec {SYSTEMD} --user"
        # Its own control group: systemd takes over the group that it starts in, with all processes there.
        self.cgroups = [base / folder.name for base in HIERARCHIES if (base / "cgroup.procs").exists()]
        for cgroup in self.cgroups:
            cgroup.mkdir()
            start = f"echo $$ > {cgroup}/cgroup.procs && {start}"
        self.process = subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", start], env=self.env, stderr=subprocess.DEVNULL
        )
        self.until((folder / "x" / "systemd" / "private").exists)

    def ctl(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["systemctl", "--user", *words], env=self.env, capture_output=True, text=True, timeout=PATIENCE_S
        )

    def show(self, unit: str) -> dict[str, str]:
        names = "ActiveState,Result,NRestarts,MainPID,StatusText,ExecMainStatus"
        lines = self.ctl("show", unit, f"--property={names}").stdout.splitlines()
        return dict(line.split("=", 1) for line in lines)

    def until(self, holds: Callable[[], object]) -> None:
        give_up_at = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < give_up_at and self.process.poll() is None
            time.sleep(0.1)  # without a bus no event tells of a unit's changes

    def install(self, name: str, *service: str, **env: str) -> str:
        """Install the unit, changed only in the user who runs it and in its paths. ``service``: lines to
        add."""
        here = str(self.folder)
        text = UNIT.read_text().replace("/opt/elasticd/venv/bin/elasticd", ELASTICD)
        lines = text.replace("/etc/elasticd", here).replace("/var/lib/elasticd", here).splitlines()
        kept = [line for line in lines if not line.startswith(OF_THE_SYSTEM)]
        at = kept.index("[Service]") + 1
        (self.units / "elasticd@.service").write_text("\n".join([*kept[:at], "RestartSec=100ms", *kept[at:]]))
        own = self.units / f"elasticd@{name}.service.d"
        own.mkdir()
        (own / "own.conf").write_text("\n".join(["[Service]", *service]))
        env = {"PATH": os.environ["PATH"], "ELASTICD_HTTP": "off", "ELASTICD_SLOTS": "1", **env}
        (self.folder / f"{name}.env").write_text("\n".join(f"{k}={v}" for k, v in env.items()))
        self.ctl("daemon-reload")
        return f"elasticd@{name}.service"

    def close(self) -> None:
        self.ctl("stop", "elasticd@*")
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(PATIENCE_S)
        for cgroup in self.cgroups:
            for below, _, _ in os.walk(cgroup, topdown=False):
                os.rmdir(below)


def may() -> bool:
    if not SYSTEMD or os.geteuid() != 0 or shutil.which("systemctl") is None:
        return False
    writable = any(os.access(base / "cgroup.procs", os.W_OK) for base in HIERARCHIES)
    return writable and subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode == 0


pytestmark = [
    pytest.mark.slow,  # slow, so that it does not always make control groups on the machine
    pytest.mark.skipif(not may(), reason="a systemd of one's own needs systemd, root and namespaces"),
]


@pytest.fixture
def systemd() -> Iterator[Systemd]:
    with tempfile.TemporaryDirectory(prefix="sd") as name:
        running = Systemd(Path(name))
        try:
            yield running
        finally:
            running.close()


def test_a_node_is_ready_when_joined_restarted_when_stuck_drained_when_stopped(systemd: Systemd) -> None:
    job, last_words = systemd.folder / "job.py", systemd.folder / "last_words"
    job.write_text("import signal\nsignal.pause()\n")
    unit = systemd.install("gpt", "WatchdogSec=4s", SCRIPT=str(job), ELASTICD_TERMINATION_LOG=str(last_words))
    started = systemd.ctl("start", unit)
    assert started.returncode == 0, started.stderr
    first = systemd.show(unit)
    assert (first["ActiveState"], first["NRestarts"]) == ("active", "0")
    systemd.until(
        lambda: systemd.show(unit)["StatusText"] == "round 1 is live: 1 of 1 workers run on this node"
    )

    os.kill(int(first["MainPID"]), signal.SIGSTOP)

    def again() -> bool:
        now = systemd.show(unit)
        return now["NRestarts"] == "1" and now["ActiveState"] == "active"

    systemd.until(again)
    assert systemd.show(unit)["MainPID"] not in ("0", first["MainPID"])

    assert systemd.ctl("stop", unit).returncode == 0
    over = systemd.show(unit)
    assert (over["ActiveState"], over["Result"]) == ("inactive", "success")
    assert " drained, after " in last_words.read_text()


def test_bad_usage_is_not_tried_again_and_an_etcd_that_is_away_is(systemd: Systemd) -> None:
    bad = systemd.install("bad", SCRIPT="/no/script.py")
    systemd.ctl("start", bad)
    systemd.until(lambda: systemd.show(bad)["ActiveState"] == "failed")
    told = systemd.show(bad)
    assert (told["NRestarts"], told["ExecMainStatus"]) == ("0", "2")

    job = systemd.folder / "job.py"
    job.touch()
    nowhere = {"ELASTICD_ETCD": "http://127.0.0.1:1", "ELASTICD_ETCD_WAIT": "0.2"}
    away = systemd.install("away", SCRIPT=str(job), **nowhere)
    systemd.ctl("start", "--no-block", away)
    systemd.until(lambda: int(systemd.show(away)["NRestarts"]) >= 1)
