"""Of a tensor in many shards, a rank looks only at the chunks that may have rows of its part."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elasticd.checkpoint.client.load_plan import _near
from elasticd.checkpoint.format.manifest import Chunk


def chunk(first: int, rows: int) -> Chunk:
    return Chunk(0, 0, (first, 0), (rows, 3), 0, 0)


@given(
    st.lists(st.builds(chunk, st.integers(0, 60), st.integers(0, 9)), max_size=40),
    st.integers(0, 60),
    st.integers(0, 20),
)
def test_all_chunks_with_rows_of_the_part_are_among_those_looked_at(
    chunks: list[Chunk], first: int, rows: int
) -> None:
    near = _near(chunks, (first, 0), (rows, 3))
    for one in chunks:
        if max(first, one.offsets[0]) < min(first + rows, one.offsets[0] + one.sizes[0]):
            assert one in near


def test_of_a_tensor_in_many_shards_few_chunks_are_looked_at() -> None:
    chunks = [chunk(4 * place, 4) for place in range(1000)]
    assert _near(chunks, (403, 0), (5, 3)) == chunks[100:102]
    assert _near(chunks[::-1], (403, 0), (5, 3)) == chunks[100:102]
    assert _near(chunks, (), ()) == chunks, "a tensor without rows"
