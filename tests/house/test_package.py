"""What users of the package rely on: its extras, and one version in all files."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

from elasticd import __version__
from tests.house.test_layers import MODULES, name, roots

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
FOR_JOBS = EXTRAS.keys() - {"docs", "test"}
GUIDE = (ROOT / "docs" / "install.md").read_text()
IMPORTED_AS = {"grpcio": "grpc", "protobuf": "google", "nvidia_ml_py": "pynvml"}


def modules(requirements: list[str]) -> set[str]:
    """Return the modules that each package provides."""
    packages = {re.split(r"[<>=\[ ]", line)[0].replace("-", "_") for line in requirements}
    return {IMPORTED_AS.get(package, package) for package in packages}


def test_every_imported_package_is_a_dependency_or_in_an_extra() -> None:
    known = modules([*PROJECT["dependencies"], *(line for extra in FOR_JOBS for line in EXTRAS[extra])])
    known |= sys.stdlib_module_names | {"sitecustomize"}
    # packages for the integrations: a script has installed its own library
    known |= {"accelerate", "lightning", "transformers"}
    found = {
        name(module): unknown
        for module in MODULES
        if (unknown := {root for root in roots(module) - known if not root.startswith("elasticd")})
    }
    assert not found


def test_each_extra_that_a_message_or_a_page_names_exists_and_the_guide_has_them_all() -> None:
    texts = [*MODULES, *(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md")]
    named = re.findall(r"elasticd\[([a-z0-9,]+)\]", "\n".join(path.read_text() for path in texts))
    told = {extra for names in named for extra in names.split(",")}
    assert told <= EXTRAS.keys()
    assert told >= FOR_JOBS, "elasticd says which extra is missing"
    rows = re.findall(r"^\| (`.*?) \|", GUIDE, re.MULTILINE)
    assert set(re.findall(r"\w+", " ".join(rows))) == EXTRAS.keys()


def test_the_image_has_the_version_of_the_package_wherever_it_is_named() -> None:
    tag = re.compile(r"(?:\belasticd:|name: elasticd(?:\n\s+|, newName: \S+, )newTag: )(\d+\.\d+\.\d+)")
    below = [path for folder in ("deploy", "k8s") for path in (ROOT / folder).rglob("*")]
    files = [path for path in below if path.is_file() and "__pycache__" not in path.parts]
    found = {path: set(tag.findall(path.read_text())) for path in [*files, ROOT / "CONTRIBUTING.md"]}
    assert len([path for path in found if found[path]]) >= 5
    assert not {path for path, versions in found.items() if versions - {__version__}}
