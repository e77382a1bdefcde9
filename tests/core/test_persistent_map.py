"""A mapping of many keys that never changes, held against a plain dict."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elasticd.core.persistent_map import PARTS, PersistentMap

changes = st.lists(st.tuples(st.sampled_from([f"n{i}" for i in range(2 * PARTS)]), st.none() | st.integers()))


@given(changes)
def test_it_holds_what_a_dict_would(changes: list[tuple[str, int | None]]) -> None:
    plain: dict[str, int] = {}
    spread: PersistentMap[int] = PersistentMap()
    for key, value in changes:
        before = dict(spread)
        if value is None:
            plain.pop(key, None)
            changed = spread.without(key)
        else:
            plain[key] = value
            changed = spread.put(key, value)
        assert before == spread, "the old one is as it was"
        spread = changed
    assert spread == plain and len(spread) == len(plain)
    assert all(spread.get(key) == plain.get(key) for key in ("n0", "n1", *plain))
