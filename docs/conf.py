"""Sphinx builds the documentation with this file: ``sphinx-build -W -c docs . OUTPUT``, from the root of the
repository, and the manual page with ``-b man``. The pages of metrics and events are made from the code."""

from __future__ import annotations

import sys
from pathlib import Path

from docutils.nodes import document
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

project = "elasticd"
copyright = "the authors of elasticd"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_click", "sphinxcontrib.mermaid"]
root_doc = "docs/index"
include_patterns = [
    "docs/**",
    *("README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"),
    *("deploy/README.md", "deploy/prometheus/README.md", "k8s/README.md", "workers/README.md"),
]
exclude_patterns = [".*", "build"]  # environments and caches have very many files
html_theme = "furo"
man_pages = [("docs/commands", "elasticd", "keep PyTorch training running", [], 1)]
myst_heading_anchors = 3
myst_fence_as_directive = ["mermaid"]
suppress_warnings = ["ref.option"]  # the help of `run` names options of torchrun that it does not list
autodoc_typehints = "description"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _metrics() -> str:
    from elasticd.telemetry.catalog import LABELS, METRICS

    rows = [
        f"| `{metric.name}` | {metric.type} | {', '.join(metric.labels)} | {_cell(metric.help)} |"
        for metric in METRICS
    ]
    labels = [f"| `{label}` | {_cell(meaning)} |" for label, meaning in LABELS.items()]
    return "\n".join(
        [
            "# Metrics",
            "",
            "Every metric has the labels `run` and `node`.",
            "",
            "| metric | type | other labels | meaning |",
            "|---|---|---|---|",
            *rows,
            "",
            "## Labels",
            "",
            "| label | meaning |",
            "|---|---|",
            *labels,
            "",
        ]
    )


def _meaning(reason: type) -> str:
    text = reason.__doc__ or ""
    return "" if text.startswith(f"{reason.__name__}(") else _cell(text).replace("``", "`")


def _events() -> str:
    from elasticd.telemetry.describe import EVENTS

    rows = [f"| `{name}` | {level} | {_meaning(reason)} |" for reason, (name, level) in EVENTS.items()]
    return "\n".join(
        [
            "# Events",
            "",
            "The decisions of agents and of the leader, as `elasticd events` and the JSON log name them.",
            "",
            "| event | level | meaning |",
            "|---|---|---|",
            *rows,
            "",
        ]
    )


def _make_pages(app: Sphinx) -> None:
    (ROOT / "docs/metrics.md").write_text(_metrics())
    (ROOT / "docs/events.md").write_text(_events())


def _without_links_to_folders(app: Sphinx, doctree: document) -> None:
    """A link to a folder leads somewhere where the repository is browsed, and not in the pages made here."""
    for link in list(doctree.findall(pending_xref)):
        page = ROOT / f"{link.get('refdoc')}.md"
        if page.parent.joinpath(link["reftarget"]).is_dir():
            link.replace_self(link.children)


def setup(app: Sphinx) -> None:
    app.connect("doctree-read", _without_links_to_folders)
    app.connect("config-inited", lambda app, config: _make_pages(app))
