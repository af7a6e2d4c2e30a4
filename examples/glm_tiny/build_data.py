"""Turn text and conversations into token arrays, once, before training.

Every token has a weight in the loss, stored as a byte (255 = 1.0): the assistant's words count fully, the rest of a
conversation a little, and the random lines of a key-value table almost nothing, because nobody can predict them.
"""

import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from . import corpus
from .conversations import Conversation, make_conversation, make_needle
from .prompt_format import PromptFormat
from .vocabulary import require_id, train_tokenizer

TRAIN_SEED, HELD_OUT_SEED = 1, 2
FULL_WEIGHT, PROMPT_WEIGHT, TABLE_WEIGHT = 255, 64, 8
MAX_NEEDLE_LINES = 230


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenStream:
    """Documents of one kind laid end to end.

    Attributes:
        ids: u16 [n], token ids.
        weights: u8 [n], weight of predicting that token, 255 = 1.0.
        starts: i64 [documents + 1], where each document begins; the last entry is n.
    """

    ids: npt.NDArray[np.uint16]
    weights: npt.NDArray[np.uint8]
    starts: npt.NDArray[np.int64]


def build_data(folder: Path, *, num_conversations: int, num_needles: int, num_held_out: int = 400) -> None:
    """Write tokenizer.json and tokens.npz: streams code, test, docs, chat, needle and their `held_` twins."""
    folder.mkdir(parents=True, exist_ok=True)
    documents = corpus.standard_library() + corpus.documentation()
    prompt_format = PromptFormat()
    conversations = _draw(TRAIN_SEED, num_conversations)
    held_conversations = _draw(HELD_OUT_SEED, num_held_out)
    tables = _draw_tables(TRAIN_SEED, num_needles)
    held_tables = _draw_tables(HELD_OUT_SEED, num_held_out)

    rendered = [render_conversation(c, prompt_format) for c in conversations[:6000]]
    rendered += [render_conversation(t, prompt_format)[:1500] for t in tables[:1000]]
    kept = [d.text for d in documents if not d.held_out and d.kind != "test"]
    tokenizer = train_tokenizer(_without_specials(kept + rendered))
    tokenizer.save(str(folder / "tokenizer.json"))

    arrays: dict[str, npt.NDArray[np.generic]] = {}
    for kind in ("code", "test", "docs"):
        for prefix, held_out in (("", False), ("held_", True)):
            texts = [d.text for d in documents if d.kind == kind and d.held_out is held_out]
            _store(arrays, prefix + kind, _encode_texts(texts, tokenizer))
    for name, group in (
        ("chat", conversations),
        ("held_chat", held_conversations),
        ("needle", tables),
        ("held_needle", held_tables),
    ):
        _store(arrays, name, _encode_conversations(group, tokenizer, prompt_format, is_table="needle" in name))
    np.savez_compressed(folder / "tokens.npz", allow_pickle=False, **arrays)


def load_data(folder: Path) -> tuple[Tokenizer, dict[str, TokenStream]]:
    """Read what `build_data` wrote."""
    with np.load(folder / "tokens.npz") as arrays:
        names = [name.removesuffix(".ids") for name in arrays.files if name.endswith(".ids")]
        streams = {
            name: TokenStream(
                ids=arrays[f"{name}.ids"], weights=arrays[f"{name}.weights"], starts=arrays[f"{name}.starts"]
            )
            for name in names
        }
    return Tokenizer.from_file(str(folder / "tokenizer.json")), streams


def render_conversation(conversation: Conversation, prompt_format: PromptFormat) -> str:
    """Give the text of a finished conversation, with the `<|user|>` at which the last reply stops."""
    text = prompt_format.render(conversation.messages, tools=conversation.tools, enable_thinking=conversation.thinking)
    return text + "<|user|>"


def _draw(seed: int, count: int) -> list[Conversation]:
    rng = random.Random(seed)
    return [make_conversation(rng) for _ in range(count)]


def _draw_tables(seed: int, count: int) -> list[Conversation]:
    rng = random.Random(1000 + seed)
    return [make_needle(rng, max_lines=rng.choice((30, 100, 180, MAX_NEEDLE_LINES))) for _ in range(count)]


def _without_specials(texts: list[str]) -> list[str]:
    """Cut rendered text at special tokens' brackets so that the BPE learns words, not the markers."""
    return [text.replace("<|", "\n").replace("|>", "\n") for text in texts]


def _encode_texts(texts: list[str], tokenizer: Tokenizer) -> TokenStream:
    end = require_id(tokenizer, "<|endoftext|>")
    pieces = [np.array([*e.ids, end], dtype=np.uint16) for e in tokenizer.encode_batch(texts, add_special_tokens=False)]
    return _stream(pieces, [np.full(len(p), FULL_WEIGHT, dtype=np.uint8) for p in pieces])


def _encode_conversations(
    group: list[Conversation], tokenizer: Tokenizer, prompt_format: PromptFormat, *, is_table: bool
) -> TokenStream:
    texts = [render_conversation(c, prompt_format) for c in group]
    pieces = [np.array(e.ids, dtype=np.uint16) for e in tokenizer.encode_batch(texts, add_special_tokens=False)]
    return _stream(pieces, [_turn_weights(p, tokenizer, is_table=is_table) for p in pieces])


def _turn_weights(ids: npt.NDArray[np.uint16], tokenizer: Tokenizer, *, is_table: bool) -> npt.NDArray[np.uint8]:
    """Weigh the assistant's turns, with the role token that ends them, fully and everything else lightly."""
    roles = [require_id(tokenizer, t) for t in ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")]
    is_role = np.isin(ids, roles)
    turn = np.maximum.accumulate(np.where(is_role, np.arange(len(ids)), 0))
    by_assistant = ids[turn] == roles[2]
    ends_reply = is_role & np.concatenate([[False], by_assistant[:-1]])
    prompt_weight = TABLE_WEIGHT if is_table else PROMPT_WEIGHT
    return np.where((by_assistant & ~is_role) | ends_reply, FULL_WEIGHT, prompt_weight).astype(np.uint8)


def _stream(pieces: list[npt.NDArray[np.uint16]], weights: list[npt.NDArray[np.uint8]]) -> TokenStream:
    starts = np.cumsum([0, *map(len, pieces)], dtype=np.int64)
    return TokenStream(ids=np.concatenate(pieces), weights=np.concatenate(weights), starts=starts)


def _store(arrays: dict[str, npt.NDArray[np.generic]], name: str, stream: TokenStream) -> None:
    arrays[f"{name}.ids"], arrays[f"{name}.weights"], arrays[f"{name}.starts"] = (
        stream.ids,
        stream.weights,
        stream.starts,
    )
