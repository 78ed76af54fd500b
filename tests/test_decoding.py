"""Text assembled from tokens: stop strings held back, characters never split."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_tokenizer

from contextmem.codec import Codec, pieces_until_stop

TOKENIZER = tiny_tokenizer()
CODEC = Codec(TOKENIZER)


@given(st.lists(st.text("abc", max_size=3), max_size=8), st.lists(st.text("abc", min_size=1, max_size=3), max_size=2))
def test_pieces_end_at_the_first_stop_string(pieces: list[str], stops: list[str]) -> None:
    whole = "".join(pieces)
    found = [whole.find(stop) for stop in stops if stop in whole]
    out = list(pieces_until_stop(pieces, stops))
    assert any(stopped for _, stopped in out) == bool(found)
    assert "".join(text for text, _ in out) == (whole[: earliest(whole, pieces, stops)] if found else whole)


def earliest(whole: str, pieces: list[str], stops: list[str]) -> int:
    """Where the stop string begins that is complete first; of several complete at once, the one that begins first."""
    seen = ""
    for piece in pieces:
        seen += piece
        if found := [seen.find(stop) for stop in stops if stop in seen]:
            return min(found)
    return len(whole)


@given(st.text(max_size=30))
def test_streaming_any_text_gives_it_back_without_splitting_a_character(text: str) -> None:
    ids = CODEC.encode(text)
    stream = CODEC.stream()
    pieces = [stream.push(token) for token in ids]
    pieces.append(stream.finish())
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces if "\ufffd" not in text)


@given(st.lists(st.integers(0, 255), max_size=30))
def test_streaming_broken_bytes_gives_what_decoding_gives(values: list[int]) -> None:
    ids = [value + 3 for value in values]
    stream = CODEC.stream()
    assert "".join([stream.push(token) for token in ids] + [stream.finish()]) == CODEC.decode(
        ids, skip_special_tokens=True
    )


@given(st.text(max_size=20), st.integers(0, 25))
def test_the_longest_prefix_is_a_prefix_of_the_text_and_of_the_ids(text: str, limit: int) -> None:
    ids = CODEC.encode(text)
    part, kept = CODEC.longest_prefix(text, ids, limit)
    assert text.startswith(part) and kept == ids[: len(kept)] and len(kept) <= limit
    assert CODEC.decode(kept) == part
    assert limit < len(ids) or part == text
