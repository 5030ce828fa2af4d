import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvprobe.generation.detokenise import RowText


def spell(tokens):
    """A tokenizer of single bytes, which drops a space at the beginning, as SentencePiece does."""
    return bytes(tokens).decode(errors="replace").removeprefix(" ")


def pieces(tokens, spell, stops=()):
    row = RowText(spell, stops)
    for token in tokens:
        yield row.add(token)
        if row.stopped:
            break
    yield row.end()


def test_pieces_are_the_text_and_no_half_character_is_shown():
    text = "a né€ 🙂 b"
    assert [piece for piece in pieces(text.encode(), spell) if piece] == list(text)
    assert [*filter(None, pieces(text.encode()[:-3], spell))] == [*text[:-3], "\ufffd"]


def test_the_end_comes_once():
    row = RowText(spell, ["xy"])
    assert [row.add(token) for token in b"ax\xe2"] == ["a", "", ""]
    assert (row.end(), row.end()) == ("x\ufffd", "")


@given(
    words=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=12),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), max_size=3),
)
def test_a_stop_text_is_found_however_the_text_is_cut_into_tokens(words, stops):
    whole = "".join(words)
    # the first prefix that ends with a stop text, without the longest that it ends with
    ends = (whole[:n] for n in range(1, len(whole) + 1) if whole[:n].endswith(tuple(stops)))
    first = next(ends, None)
    longest = max((len(stop) for stop in stops if first is not None and first.endswith(stop)), default=0)
    expected = whole if first is None else first[: len(first) - longest]

    row = RowText(lambda tokens: "".join(words[token] for token in tokens), stops)
    fed, got = 0, ""
    for token in range(len(words)):
        got += row.add(token)
        fed += 1
        # nothing is given that a stop text could still take back
        assert expected.startswith(got)
        if row.stopped:
            break
    assert got + row.end() == expected
    assert row.stopped == (first is not None)
    # not one token later than the stop text is complete
    assert first is None or len("".join(words[: fed - 1])) < len(first) <= len("".join(words[:fed]))


def test_an_empty_stop_text_is_refused():
    with pytest.raises(ValueError, match="a stop text is empty"):
        RowText(spell, ["a", ""])
