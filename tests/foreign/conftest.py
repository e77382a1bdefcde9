from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.forkserver import ELASTICD, TORCHRUN, Forked

PROGRAMS = Path(__file__).parent / "programs"
PATIENCE_S = 100


@dataclass
class Running:
    process: Forked
    out: Path
    err: Path

    def end(self) -> Ended:
        self.process.wait(PATIENCE_S)
        return Ended(self.process.returncode, self.out.read_bytes().decode(), self.err.read_bytes().decode())


@dataclass(frozen=True)
class Ended:
    status: int
    out: str
    err: str

    def printed(self, *lines: str) -> bool:
        """Whether stdout has these lines and nothing else, in any order.

        Unbuffered Python writes a line and its end one after the other, so that ends may come late.
        """
        rest = self.out
        for line in sorted(lines, key=len, reverse=True):
            if line not in rest:
                return False
            rest = rest.replace(line, "", 1)
        return rest == "\n" * len(lines)


@dataclass
class Launcher:
    """Starts programs in ``folder``, as a user would. ``name``: torchrun or elasticd.

    ``mended``: with the variable without which torchrun's restarts on one node do not work.
    """

    name: str
    folder: Path
    mended: bool = True
    started: list[Running] = field(default_factory=list)

    def command(self) -> list[str]:
        if self.name == "torchrun":  # without this option torchrun leaves a folder in the temporary one
            return ["torchrun", f"--log-dir={self.folder / 'logs'}"]
        return ["elasticd", "run"]

    def environment(self, more: Mapping[str, str]) -> dict[str, str]:
        ours = ("PET_", "ELASTICD_", "TORCHELASTIC_", "OMP_", "PYTEST_", "COV_")
        kept = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
        state = {
            f"XDG_{kind}_HOME": str(self.folder / kind.lower()) for kind in ("STATE", "CACHE", "RUNTIME")
        }
        quirk = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if self.mended else {}
        return kept | state | quirk | {"PYTHONPATH": str(PROGRAMS)} | more

    def start(
        self,
        *arguments: str | Path,
        nproc: int = 2,
        restarts: int = 0,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
    ) -> Running:
        limits = ["--standalone", f"--nproc-per-node={nproc}", f"--max-restarts={restarts}"]
        number = len(self.started)
        fed, out, err = (self.folder / f"{self.name}-{number}.{kind}" for kind in ("in", "out", "err"))
        fed.write_bytes(stdin)
        with fed.open("rb") as i, out.open("wb") as o, err.open("wb") as e:
            process = Forked(
                [*self.command(), *limits, *map(str, arguments)],
                cwd=self.folder,
                env=self.environment(env or {}),
                stdin=i.fileno(),
                stdout=o.fileno(),
                stderr=e.fileno(),
                entry=TORCHRUN if self.name == "torchrun" else ELASTICD,
            )
        running = Running(process, out, err)
        self.started.append(running)
        return running

    def run(self, *arguments: str | Path, **options: object) -> Ended:
        return self.start(*arguments, **options).end()  # type: ignore[arg-type]

    def close(self) -> None:
        for running in self.started:
            if running.process.poll() is None:
                running.process.send_signal(signal.SIGTERM)
                try:
                    running.process.wait(40)
                except subprocess.TimeoutExpired:
                    running.process.kill()
                    running.process.wait()


# torchrun changes with torch alone, so these cases need not run each time.
@pytest.fixture(params=[pytest.param("torchrun", marks=pytest.mark.slow), "elasticd"])
def launcher(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Launcher]:
    """Run the test with each launcher: it says what torchrun does, and that elasticd does the same."""
    launcher = Launcher(request.param, tmp_path)
    yield launcher
    launcher.close()


@pytest.fixture
def launchers(tmp_path: Path) -> Iterator[tuple[Launcher, Launcher]]:
    """Both launchers, for behaviour that only a comparison shows."""
    both = tuple(Launcher(name, tmp_path, mended=False) for name in ("torchrun", "elasticd"))
    yield both  # type: ignore[misc]
    for launcher in both:
        launcher.close()


@pytest.fixture
def elasticd(tmp_path: Path) -> Iterator[Launcher]:
    """Return elasticd as the launcher, for cases in which torchrun itself fails."""
    launcher = Launcher("elasticd", tmp_path)
    yield launcher
    launcher.close()
