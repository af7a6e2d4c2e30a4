"""Where the grammar of a reply begins, for the markup of a checkpoint, and what it must not do there."""

import codecs
import threading
from collections.abc import Sequence

import pytest

from specdec.errors import RequestError
from specdec.grammar.compiler import GrammarCompiler
from specdec.grammar.grammar import Grammar
from specdec.models.glm.released import locate_checkpoint
from specdec.replies.reply_markup import Marker, ReplyMarkup
from specdec.text.tokenizer import Tokenizer
from tests.support.grammars import allowed


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(locate_checkpoint("glm-tiny") / "tokenizer.json")


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(ReplyMarkup.of(tokenizer), vocab_size=tokenizer.vocab_size + 5)


def marker(tokenizer: Tokenizer, name: str) -> int:
    token_id = tokenizer.token_id(name)
    assert token_id is not None
    return token_id


@pytest.mark.parametrize(
    ("prompt", "is_reasoning"),
    [
        (["<|assistant|>", "<think>"], True),
        (["<|assistant|>", "<think>", "</think>"], False),
        (["<|assistant|>", "</think>"], False),
        (["<|user|>", "<think>", "<|assistant|>"], False),
        ([], False),
    ],
)
def test_grammar_begins_where_the_prompt_leaves_the_reasoning(
    prompt: Sequence[str], is_reasoning: bool, compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    prompt_ids = [1, *(marker(tokenizer, name) for name in prompt)]
    for begins_after_reasoning in (True, False):
        grammar = Grammar.json_object(begins_after_reasoning=begins_after_reasoning)
        progress = compiler.begin(grammar, prompt_ids=prompt_ids, end_ids=[marker(tokenizer, "<|user|>")])
        parts = progress.parts_of([])
        assert (parts.num_reasoning, parts.num_grammar) == (
            (1, 0) if is_reasoning and begins_after_reasoning else (0, 1)
        )


def test_reasoning_must_end_by_its_marker(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    end_id = marker(tokenizer, "<|user|>")
    progress = compiler.begin(Grammar.json_object(), prompt_ids=[marker(tokenizer, "<think>")], end_ids=[end_id])
    assert progress.early_ids == {end_id, marker(tokenizer, Marker.CALL.value)}


def begins_a_text(piece: bytes) -> bool:
    try:
        codecs.getincrementaldecoder("utf-8")().decode(piece)
    except UnicodeDecodeError:
        return False
    return True


def test_markers_and_ids_without_a_token_are_never_text(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    progress = compiler.begin(Grammar.regex(r"(?s:.*)"), prompt_ids=[1], end_ids=[2])
    allowed_V = allowed(progress.matcher)[0, :-1]
    for token_id, is_allowed in enumerate(allowed_V.tolist()):
        piece = b"" if token_id in tokenizer.added_token_ids else tokenizer.token_bytes(token_id)
        assert is_allowed == (piece != b"" and begins_a_text(piece))


def test_grammar_without_a_text_is_refused(compiler: GrammarCompiler) -> None:
    with pytest.raises(RequestError, match="grammar: json_schema cannot be followed: no token goes on with it"):
        compiler.begin(Grammar.json_schema({"$ref": "#"}), prompt_ids=[1], end_ids=[2])


def test_text_must_be_able_to_end(compiler: GrammarCompiler) -> None:
    with pytest.raises(RequestError, match=r"grammar: needs an id that ends the text.*give stop_token_ids"):
        compiler.begin(Grammar.json_object(), prompt_ids=[1], end_ids=[])


def test_checkpoint_without_markup_begins_at_once(tokenizer: Tokenizer) -> None:
    plain = ReplyMarkup(tokenizer=tokenizer, id_by_marker={}, marker_by_id={})
    compiler = GrammarCompiler(plain, vocab_size=tokenizer.vocab_size)
    progress = compiler.begin(Grammar.json_object(), prompt_ids=[marker(tokenizer, "<think>")], end_ids=[2])
    assert progress.parts_of([]).num_grammar == 1


def test_threads_compile_side_by_side(compiler: GrammarCompiler) -> None:
    """While one of them, as the one that runs the rounds does, looks at masks."""
    grammars = [Grammar.json_schema({"enum": [f"value {i}", i]}) for i in range(12)]
    expected = [allowed(compiler.begin(each, prompt_ids=[1], end_ids=[2]).matcher).tolist() for each in grammars]
    found: dict[int, object] = {}

    def work(first: int) -> None:
        for place in range(first, len(grammars), 3):
            progress = compiler.begin(grammars[place], prompt_ids=[1], end_ids=[2])
            found[place] = [allowed(progress.matcher).tolist() for _ in range(3)]

    threads = [threading.Thread(target=work, args=(first,)) for first in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[place] for place in range(len(grammars))] == [[each] * 3 for each in expected]
