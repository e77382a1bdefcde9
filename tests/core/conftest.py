"""A loaded machine is no failure: examples have no deadline. Stories can be recorded anew."""

import pytest
from hypothesis import settings

settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", action="store_true", help="write the transcripts of the stories anew")
