"""The picture in README comes from a real run, and needs no network."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree as ET

import pyte
import pytest

ROOT = Path(__file__).parents[2]
HERE = ROOT / "deploy" / "pictures"


@pytest.fixture
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_pictures", HERE / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def text_of(picture: str) -> str:
    """Return the text of the picture line by line, without the title."""
    lines: dict[float, str] = {}
    for part in ET.fromstring(picture).iter("{http://www.w3.org/2000/svg}text"):
        if "textLength" in part.attrib:
            y = float(part.attrib["y"])
            lines[y] = lines.get(y, "") + (part.text or "").replace("\xa0", " ")
    return "\n".join(line.rstrip() for _, line in sorted(lines.items()))


def test_what_readme_shows_needs_no_network_and_tells_of_the_worker_that_hung() -> None:
    picture = (HERE / "top.svg").read_text()
    assert "](deploy/pictures/top.svg)" in (ROOT / "README.md").read_text()
    assert len(picture) < 150_000
    assert not re.search(r"href=|src=|@font-face|@import|url\((?!#)", picture)
    shown = " ".join(text_of(picture).split())
    assert "restarts 2 (8 left)" in shown and " % productive of " in shown
    assert re.search(r"hung: rank 1 on node a is stopped \(SIGSTOP\) in \S+; the other 3 wait for it", shown)


def test_a_screen_is_drawn_with_its_words_and_colours(generate: ModuleType) -> None:
    screen = pyte.Screen(20, 4)
    pyte.ByteStream(screen).feed(b"\x1b[32mrunning\x1b[0m <1> \x1b[33mlate\x1b[0m\r\n  below\r\n")
    picture = generate.drawn(screen, "title")
    assert text_of(picture).splitlines() == ["running <1> late", "  below"]
    assert ">title<" in picture and len(set(re.findall(r"fill: (#\w+)", picture))) >= 3


def test_a_program_that_has_ended_has_shown_all_that_it_said(generate: ModuleType) -> None:
    with generate.Terminal("sh", "-c", "stty size; echo last") as terminal:
        terminal.until_said("last")
    assert terminal.screen.display[0].split() == [str(generate.ROWS), str(generate.COLUMNS)]
