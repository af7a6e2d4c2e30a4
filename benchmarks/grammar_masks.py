"""What a grammar costs: compiling it, its masks by row, and applying them to logits.

Replies are written token by token as a tokenizer that prefers long tokens would cut them, with the right drafts. The
vocabulary decides: give the tokenizer of a released checkpoint for its numbers.

Run: python benchmarks/grammar_masks.py [--tokenizer tokenizer.json] [--num-drafts 3] [--batch 1 8 32]
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from specdec.grammar.compiler import GrammarCompiler
from specdec.grammar.grammar import Grammar
from specdec.grammar.grammar_rows import grammar_rows
from specdec.kernels.logits_transform import LogitsRules, transform_logits
from specdec.models.glm.released import locate_checkpoint
from specdec.replies.reply_markup import ReplyMarkup
from specdec.text.tokenizer import Tokenizer

_ORDER = {
    "customer": {"name": "Ana Sousa", "email": "ana@example.org", "is_member": True},
    "items": [{"sku": f"A-{i}", "quantity": i, "note": "leave it at the door, please"} for i in range(1, 6)],
    "total": 129.5,
    "currency": "EUR",
}
_ITEM = {"sku": {"type": "string", "pattern": "^[A-Z]-[0-9]+$"}, "quantity": {"type": "integer", "minimum": 1}}
CASES: dict[str, tuple[Grammar, str]] = {
    "any object": (Grammar.json_object(), json.dumps(_ORDER)),
    "schema": (
        Grammar.json_schema(
            {
                "type": "object",
                "properties": {
                    "customer": {
                        "type": "object",
                        "properties": {
                            "name": {"type": "string"},
                            "email": {"type": "string", "format": "email"},
                            "is_member": {"type": "boolean"},
                        },
                        "required": ["name", "email"],
                        "additionalProperties": False,
                    },
                    "items": {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "properties": {**_ITEM, "note": {"type": "string", "maxLength": 200}},
                            "required": ["sku", "quantity"],
                            "additionalProperties": False,
                        },
                    },
                    "total": {"type": "number"},
                    "currency": {"enum": ["EUR", "USD", "CNY"]},
                },
                "required": ["customer", "items", "total", "currency"],
                "additionalProperties": False,
            }
        ),
        json.dumps(_ORDER),
    ),
    "expression": (
        Grammar.regex(r"(\+[0-9]{1,3} )?[0-9]{2,4}(-[0-9]{2,4}){2,3}(; [a-z ]{3,40}){0,8}"),
        "+351 21-790-4500; reception on the ground floor; ask for the keys",
    ),
}


def long_tokens(text: str, id_by_bytes: dict[bytes, int]) -> list[int]:
    """Cut a text into the longest tokens from its beginning on."""
    data, token_ids = text.encode(), []
    while data:
        length = next(n for n in range(min(64, len(data)), 0, -1) if data[:n] in id_by_bytes)
        token_ids.append(id_by_bytes[data[:length]])
        data = data[length:]
    return token_ids


def measure(
    compiler: GrammarCompiler, grammar: Grammar, token_ids: Sequence[int], *, num_drafts: int, batch: int
) -> dict[str, float]:
    """Give milliseconds of compiling, and microseconds a row of masks and of applying them."""
    start = time.perf_counter()
    first = compiler.begin(grammar, prompt_ids=[0], end_ids=[0])
    compile_s = time.perf_counter() - start
    replies = [compiler.begin(grammar, prompt_ids=[0], end_ids=[0]) for _ in range(batch - 1)] + [first]
    masks_s, apply_s = [], []
    for place in range(0, len(token_ids), num_drafts + 1):
        run = token_ids[place : place + num_drafts + 1]
        drafts = [run[:num_drafts]] * batch
        start = time.perf_counter()
        rows = grammar_rows(replies, drafts)
        masks_s.append((time.perf_counter() - start) / sum(len(each) + 1 for each in drafts))
        assert rows is not None
        logits_TV = torch.zeros(int(rows.row_R.max()) + 1, rows.bits_MX.shape[1] * 8)
        start = time.perf_counter()
        transform_logits(logits_TV, rows.restrict(LogitsRules(), device=logits_TV.device))
        apply_s.append((time.perf_counter() - start) / len(logits_TV))
        for reply in replies:
            reply.observe(run)
    return {
        "compile ms": compile_s * 1e3,
        "mask us median": statistics.median(masks_s) * 1e6,
        "mask us mean": statistics.mean(masks_s) * 1e6,
        "mask us most": max(masks_s) * 1e6,
        "apply us median": statistics.median(apply_s) * 1e6,
    }


def main() -> None:
    """Print a line for every grammar and batch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, default=locate_checkpoint("glm-tiny") / "tokenizer.json")
    parser.add_argument("--vocab-size", type=int, help="Of the model; else the tokenizer's.")
    parser.add_argument("--num-drafts", type=int, default=3)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    arguments = parser.parse_args()
    tokenizer = Tokenizer(arguments.tokenizer)
    vocab_size = arguments.vocab_size or tokenizer.vocab_size
    start = time.perf_counter()
    compiler = GrammarCompiler(ReplyMarkup.of(tokenizer), vocab_size=vocab_size)
    print(f"{vocab_size} ids: prepared in {time.perf_counter() - start:.2f} s")
    pieces = set(range(tokenizer.vocab_size)) - tokenizer.added_token_ids
    id_by_bytes = {tokenizer.token_bytes(token_id): token_id for token_id in pieces}
    for name, (grammar, text) in CASES.items():
        token_ids = long_tokens(text, id_by_bytes)
        for batch in arguments.batch:
            found: dict[str, Any] = measure(compiler, grammar, token_ids, num_drafts=arguments.num_drafts, batch=batch)
            numbers = ", ".join(f"{key} {value:.1f}" for key, value in found.items())
            print(f"{name}, {len(token_ids)} tokens, batch {batch}: {numbers}")


if __name__ == "__main__":
    main()
