"""The state of an agent stays small enough for people to remember."""

from __future__ import annotations

from dataclasses import fields

import pytest

from elasticd.core.agent import AgentState, Crew


@pytest.mark.parametrize(("value", "most"), [(AgentState, 20), (Crew, 8)])
def test_the_state_of_an_agent_has_few_fields(value: type[AgentState | Crew], most: int) -> None:
    assert 0 < len(fields(value)) <= most
