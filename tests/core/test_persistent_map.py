"""A mapping of many keys that never changes, compared with a plain dict."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elasticd.core.persistent_map import PARTS, PersistentMap

changes = st.lists(st.tuples(st.sampled_from([f"n{i}" for i in range(2 * PARTS)]), st.none() | st.integers()))


@given(changes)
def test_the_map_holds_the_same_items_as_a_dict(changes: list[tuple[str, int | None]]) -> None:
    plain: dict[str, int] = {}
    spread: PersistentMap[int] = PersistentMap()
    for key, value in changes:
        before = dict(spread)
        if value is None:
            plain.pop(key, None)
        else:
            plain[key] = value
        changed = spread.updated({key: value})
        assert before == spread, "the old one is as it was"
        assert [*changed.differing(spread)] == [*spread.differing(changed)]
        assert {*changed.differing(spread)} == {k for k in (key,) if changed.get(k) is not spread.get(k)}
        spread = changed
    assert spread == plain and len(spread) == len(plain) and spread.to_dict() == plain
    assert all(spread.get(key) == plain.get(key) for key in ("n0", "n1", *plain))
    assert [("n1" in spread), (1 in spread)] == [("n1" in plain), False]


@given(changes)
def test_many_changes_at_once_are_the_same_as_one_after_the_other(
    changes: list[tuple[str, int | None]],
) -> None:
    singly: PersistentMap[int] = PersistentMap({"n0": 1})
    for key, value in changes:
        singly = singly.updated({key: value})
    assert PersistentMap({"n0": 1}).updated(dict(changes)) == singly


@given(st.dictionaries(st.integers(0, 300).map(str), st.integers()), st.sets(st.integers(0, 300).map(str)))
def test_a_map_of_some_of_its_keys_has_the_other_values(plain: dict[str, int], some: set[str]) -> None:
    keys = plain.keys() & some
    others = {str(n): -n for n in range(301)}
    made = PersistentMap(plain).with_values(others, keys)
    assert made == {key: others[key] for key in keys} and len(made) == len(keys)
    assert made.updated({"301": 1})["301"] == 1
