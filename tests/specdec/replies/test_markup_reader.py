"""Text and ids that arrive at different times give the same markers in the same places."""

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.replies.markup_reader import MarkupReader, Piece
from specdec.replies.reply_markup import Marker
from specdec.text.detokenizer import Detokenizer
from tests.support.replies import glm_tiny_markup, token_ids

# Single bytes, halves of characters, merges, every special token, and one id behind the vocabulary.
ID_LISTS = st.lists(st.one_of(st.integers(0, 330), st.integers(3030, 3072)), max_size=25)


def joined(pieces: Sequence[Piece]) -> list[Marker | tuple[str, int]]:
    """Give the markers, and the text and its tokens between two of them."""
    result: list[Marker | tuple[str, int]] = [("", 0)]
    for piece in pieces:
        if piece.marker is not None:
            result += [piece.marker, ("", 0)]
        else:
            text, num_tokens = result[-1]  # type: ignore[misc]
            result[-1] = (text + piece.text, num_tokens + piece.num_tokens)
    return result


@settings(max_examples=300)
@given(ids=ID_LISTS, share=st.floats(0, 1), data=st.data())
def test_pieces_do_not_depend_on_when_ids_and_text_arrive(ids: list[int], share: float, data: st.DataObject) -> None:
    markup = glm_tiny_markup()
    text = markup.tokenizer.decode(ids, skip_special_tokens=False)
    text = text[: round(share * len(text))]  # a stop string or the end of the turn may have cut it
    reader = MarkupReader(markup)
    expected = joined([*reader.push(ids, text), *reader.finish()])

    reader = MarkupReader(markup)
    detokenizer = Detokenizer(markup.tokenizer, skip_special_tokens=False)
    pieces: list[Piece] = []
    certain = ""
    num_characters = 0
    for token_id in ids:
        certain += detokenizer.push(token_id)
        end = data.draw(st.integers(num_characters, max(num_characters, min(len(certain), len(text)))))
        pieces += reader.push([token_id], text[num_characters:end])
        num_characters = end
    pieces += reader.push([], text[num_characters:])
    assert joined([*pieces, *reader.finish()]) == expected


@given(ids=ID_LISTS)
def test_pieces_join_to_the_text_with_its_markers(ids: list[int]) -> None:
    markup = glm_tiny_markup()
    text = markup.tokenizer.decode(ids, skip_special_tokens=False)
    reader = MarkupReader(markup)
    pieces = [*reader.push(ids, text), *reader.finish()]
    hidden = [i for i in ids if markup.marker_by_id.get(i) is Marker.SPECIAL]
    shown = "".join(piece.text if piece.marker is None else piece.marker.value for piece in pieces)
    assert len(shown) == len(text) - sum(len(markup.tokenizer.token_bytes(i)) for i in hidden)
    assert [piece.marker for piece in pieces if piece.marker] == [
        markup.marker_by_id[i] for i in ids if i in markup.marker_by_id
    ]
    assert sum(piece.num_tokens for piece in pieces) == sum(i not in markup.marker_by_id for i in ids)


def test_half_a_character_before_a_marker_is_text() -> None:
    markup = glm_tiny_markup()
    half = markup.tokenizer.encode("東")[:1]
    reader = MarkupReader(markup)
    assert joined(reader.push(half, "")) == [("", 1)]
    assert reader.push(token_ids(Marker.END_THINK), "�</think>") == [Piece(text="�"), Piece(marker=Marker.END_THINK)]
    assert joined(reader.push(half, "")) == [("", 1)]
    assert reader.push([], "�") == [Piece(text="�")]  # the reply ends
    assert reader.finish() == [Piece()]


def test_a_marker_counts_once_its_text_is_delivered() -> None:
    reader = MarkupReader(glm_tiny_markup())
    ids = token_ids("a", Marker.CALL, "b")
    assert reader.push(ids, "a<tool") == [Piece(text="a", num_tokens=1)]
    assert reader.push([], "_call>") == [Piece(marker=Marker.CALL)]
    assert reader.finish() == [Piece(num_tokens=1)]


def test_a_marker_whose_text_was_left_out_counts_at_the_end_alone() -> None:
    reader = MarkupReader(glm_tiny_markup())
    assert reader.push(token_ids("a", Marker.END_CALL), "a") == [Piece(text="a", num_tokens=1)]
    assert reader.finish() == [Piece(marker=Marker.END_CALL), Piece()]

    cut_before = MarkupReader(glm_tiny_markup())
    assert cut_before.push(token_ids("a", "b", Marker.END_CALL, "c"), "a") == [Piece(text="a", num_tokens=1)]
    assert cut_before.finish() == [Piece(num_tokens=1)]

    cut_inside = MarkupReader(glm_tiny_markup())
    assert cut_inside.push(token_ids("a", Marker.END_CALL), "a</tool") == [Piece(text="a", num_tokens=1)]
    assert cut_inside.finish() == [Piece()]
