"""Measure a checkpoint: validation loss, acceptance length, needles, reasoning and tool calls.

No cache: greedy text grows by whole forward passes, and since speculative decoding emits exactly the greedy text, the
rounds it would have needed follow from one MTP pass over that text. A draft is only compared while every draft before
it was right, and then the drafted tokens are the text's own, so feeding the text equals feeding the drafts.
"""

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from . import needles
from .batches import held_out_rows
from .build_data import HELD_OUT_SEED, TokenStream
from .conversations import Message, make_conversation
from .model import TinyModel
from .prompt_format import PromptFormat
from .tool_calls import TOOL_NAMES
from .vocabulary import END_TOKENS, require_id

DRAFT_LENGTHS = (1, 2, 3, 5)
NEEDLE_DEPTHS = (0.1, 0.5, 0.9)
NEEDLE_LINES, FULL_LENGTH = (40, 90, 150), 2048  # lines for a context of FULL_LENGTH; fewer in a shorter one
NEW_TOKENS = 128
CODE_PROMPT_TOKENS = 160


@dataclass(frozen=True, kw_only=True, slots=True)
class Acceptance:
    """Speculation statistics of greedy decoding.

    Attributes:
        length: Mean tokens emitted a round, by draft length K.
        first_round: The same for the first round after the prompt alone.
        per_position: Share of rounds at K=5 in which draft j was accepted, j = 1..5.
        distinct_4grams: Share of different 4-grams in the generated text: a loop is easy to draft.
        num_prompts: Prompts measured.
    """

    length: dict[int, float]
    first_round: dict[int, float]
    per_position: tuple[float, ...]
    distinct_4grams: float
    num_prompts: int


class Evaluator:
    """Runs the measurements on one model."""

    def __init__(self, model: TinyModel, tokenizer: Tokenizer, *, device: str, rows_at_a_time: int = 50) -> None:
        self._model, self._tokenizer, self._device = model, tokenizer, device
        self._rows = rows_at_a_time
        self._format = PromptFormat()
        self._end_ids = torch.tensor([require_id(tokenizer, t) for t in END_TOKENS], device=device)

    @torch.no_grad()
    def validation_loss(self, stream: TokenStream, *, length: int, max_rows: int) -> float:
        """Weighted cross entropy of the trunk in nats a token, with sparse attention."""
        ids, weights = held_out_rows(stream, length=length, max_rows=max_rows, device=self._device)
        total = norm = 0.0
        for start in range(0, len(ids), 8):
            part, weight = ids[start : start + 8], weights[start : start + 8, 1 : length + 1]
            logits = self._model.logits(self._model.trunk(part[:, :length], sparse=True).hidden_BSH)
            losses = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), part[:, 1 : length + 1].flatten(), reduction="none"
            )
            total += float((losses * weight.flatten()).sum())
            norm += float(weight.sum())
        return total / max(norm, 1e-9)

    def code_prompts(self, stream: TokenStream, count: int) -> list[list[int]]:
        """Cut held-out code at random places: CODE_PROMPT_TOKENS tokens each."""
        rng = random.Random(HELD_OUT_SEED)
        last = len(stream.ids) - CODE_PROMPT_TOKENS
        return [
            stream.ids[start : start + CODE_PROMPT_TOKENS].tolist()
            for start in (rng.randrange(last) for _ in range(count))
        ]

    def chat_prompts(self, count: int, *, min_tokens: int = 96) -> list[list[int]]:
        """Cut fresh conversations before one of the assistant's turns."""
        rng = random.Random(HELD_OUT_SEED + 10_000)
        prompts: list[list[int]] = []
        while len(prompts) < count:
            conversation = make_conversation(rng)
            turns = [i for i, m in enumerate(conversation.messages) if m["role"] == "assistant"]
            messages = conversation.messages[: rng.choice(turns)]
            ids = self._encode(messages, tools=conversation.tools, thinking=conversation.thinking)
            if len(ids) >= min_tokens:
                prompts.append(ids)
        return prompts

    @torch.no_grad()
    def acceptance(self, prompts: Sequence[list[int]]) -> Acceptance:
        """Generate NEW_TOKENS greedily after each prompt and count the rounds that drafting would have taken."""
        emitted = {k: [0, 0] for k in DRAFT_LENGTHS}
        first = {k: [0, 0] for k in DRAFT_LENGTHS}
        accepted = [0] * max(DRAFT_LENGTHS)
        distinct: list[float] = []
        for start in range(0, len(prompts), self._rows):
            part = prompts[start : start + self._rows]
            texts = self.generate(part, NEW_TOKENS)
            matches = self._draft_matches(texts)
            for prompt, text, match in zip(part, texts, matches, strict=True):
                new = text[len(prompt) :]
                grams = [tuple(new[i : i + 4]) for i in range(len(new) - 3)]
                if grams:
                    distinct.append(len(set(grams)) / len(grams))
                for k in DRAFT_LENGTHS:
                    for number, (position, run) in enumerate(_rounds(match, len(prompt), len(text), k)):
                        gain = min(run + 1, len(text) - 1 - position)
                        emitted[k][0] += gain
                        emitted[k][1] += 1
                        if number == 0:
                            first[k][0] += gain
                            first[k][1] += 1
                        if k == max(DRAFT_LENGTHS):
                            for j in range(run):
                                accepted[j] += 1
        rounds = max(emitted[max(DRAFT_LENGTHS)][1], 1)
        return Acceptance(
            length={k: round(a / max(b, 1), 3) for k, (a, b) in emitted.items()},
            first_round={k: round(a / max(b, 1), 3) for k, (a, b) in first.items()},
            per_position=tuple(round(a / rounds, 3) for a in accepted),
            distinct_4grams=round(sum(distinct) / max(len(distinct), 1), 3),
            num_prompts=len(prompts),
        )

    @torch.no_grad()
    def generate(self, prompts: Sequence[list[int]], max_new: int) -> list[list[int]]:
        """Continue each prompt greedily up to and including an end token; prompts of any lengths."""
        lengths = torch.tensor([len(p) for p in prompts], device=self._device)
        width = int(lengths.max()) + max_new
        ids = torch.zeros(len(prompts), width, dtype=torch.long, device=self._device)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = torch.tensor(prompt, device=self._device)
        running = torch.ones_like(lengths, dtype=torch.bool)
        rows = torch.arange(len(prompts), device=self._device)
        for _ in range(max_new):
            longest = int(lengths[running].max())
            live = rows[running]
            hidden = self._model.trunk(ids[live, :longest], sparse=longest > self._model.config.index_topk).hidden_BSH
            last = hidden[torch.arange(len(live), device=self._device), lengths[live] - 1]
            chosen = self._model.logits(last).argmax(-1)
            ids[live, lengths[live]] = chosen
            lengths[live] += 1
            running[live] = ~torch.isin(chosen, self._end_ids)
            if not bool(running.any()):
                break
        return [ids[row, : int(lengths[row])].tolist() for row in range(len(prompts))]

    @torch.no_grad()
    def needle_accuracy(self, *, depth: float, num_lines: int, count: int, thinking: bool) -> tuple[float, float]:
        """Share of tables whose value is named in the greedy reply, and the mean prompt length in tokens."""
        rng = random.Random(HELD_OUT_SEED + round(depth * 100))
        prompts: list[list[int]] = []
        values: list[str] = []
        while len(prompts) < count:
            table = needles.make_table(rng, num_lines=num_lines, num_questions=1, depth=depth)
            ids = self._encode(needles.table_messages(table, thinking=thinking)[:1], thinking=thinking)
            if len(ids) + 40 <= self._model.config.max_position_embeddings:
                prompts.append(ids)
                values.append(" = ".join(table.lines[table.asked[0]]))
        hits = 0
        for start in range(0, count, self._rows):
            part = prompts[start : start + self._rows]
            for prompt, text, value in zip(part, self.generate(part, 40), values[start:], strict=False):
                reply = self._tokenizer.decode(text[len(prompt) :], skip_special_tokens=True)
                hits += reply.rpartition("</think>")[2].strip() == value
        return hits / count, sum(map(len, prompts)) / count

    def chat_behaviour(self, *, count: int) -> dict[str, float]:
        """Rates over fresh requests: reasoning closed, turn ended, call well formed, call right in every argument."""
        rng = random.Random(HELD_OUT_SEED + 20_000)
        prompts: list[list[int]] = []
        expected: list[list[dict[str, Any]]] = []
        while len(prompts) < count:
            conversation = make_conversation(rng)
            if not conversation.thinking or not conversation.tools:
                continue
            turn = next(i for i, m in enumerate(conversation.messages) if m["role"] == "assistant")
            if "tool_calls" not in conversation.messages[turn]:
                continue
            prompts.append(self._encode(conversation.messages[:turn], tools=conversation.tools, thinking=True))
            expected.append([c["function"] for c in conversation.messages[turn]["tool_calls"]])
        closed = ended = formed = right = 0
        ends = set(self._end_ids.tolist())
        for start in range(0, count, self._rows):
            part = prompts[start : start + self._rows]
            for prompt, text, calls in zip(part, self.generate(part, 200), expected[start:], strict=False):
                reply = self._tokenizer.decode(text[len(prompt) :], skip_special_tokens=True)
                closed += "</think>" in reply
                ended += text[-1] in ends
                parsed = parse_calls(reply)
                formed += parsed is not None and len(parsed) > 0
                wanted = [(c["name"], {k: _plain(v) for k, v in c["arguments"].items()}) for c in calls]
                right += parsed == wanted
        rates = {"thinking_closed": closed, "turn_ended": ended, "call_well_formed": formed, "call_right": right}
        return {name: round(value / count, 3) for name, value in rates.items()}

    @torch.no_grad()
    def _draft_matches(self, texts: Sequence[list[int]]) -> list[list[int]]:
        """For each text and row t: how many drafts in a row equal the text's tokens t+2, t+3, ... (at most 5)."""
        steps = max(DRAFT_LENGTHS)
        width = max(map(len, texts)) + steps + 1
        ids = torch.zeros(len(texts), width, dtype=torch.long, device=self._device)
        for row, text in enumerate(texts):
            ids[row, : len(text)] = torch.tensor(text, device=self._device)
        length = width - steps - 1
        sparse = length > self._model.config.index_topk
        runs: list[Tensor] = []
        for start in range(0, len(texts), 10):
            part = ids[start : start + 10]
            hidden = self._model.trunk(part[:, :length], sparse=sparse).hidden_BSH
            rows = torch.arange(length, device=self._device)
            out = self._model.mtp(part, hidden, rows, num_steps=steps, sparse=sparse)
            equal = [
                self._model.logits(g).argmax(-1) == part[:, rows + step + 1]
                for step, g in enumerate((out.first_BSH, *out.recycled), start=1)
            ]
            runs.append(torch.stack(equal, dim=-1).long().cumprod(-1).sum(-1))
        return [list(map(int, run)) for run in torch.cat(runs).tolist()]

    def _encode(
        self, messages: Sequence[Message], *, tools: Sequence[dict[str, Any]] = (), thinking: bool
    ) -> list[int]:
        text = self._format.render(messages, tools=tools, add_generation_prompt=True, enable_thinking=thinking)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def parse_calls(reply: str) -> list[tuple[str, dict[str, str]]] | None:
    """Read the tool calls after the reasoning; None when one is malformed, [] when there is none."""
    body = reply.rpartition("</think>")[2]
    calls = []
    for piece in body.split("<tool_call>")[1:]:
        inner, closed, _ = piece.partition("</tool_call>")
        name, *pairs = inner.split("<arg_key>")
        arguments = {}
        for pair in pairs:
            key, has_value, value = pair.partition("</arg_key><arg_value>")
            if not has_value or not value.endswith("</arg_value>"):
                return None
            arguments[key] = value.removesuffix("</arg_value>")
        if not closed or name.strip() not in TOOL_NAMES:
            return None
        calls.append((name.strip(), arguments))
    return calls


def evaluate(evaluator: Evaluator, streams: dict[str, TokenStream], *, num_prompts: int, length: int) -> dict[str, Any]:
    """Take every measurement; the record that the model card quotes."""
    names = ("code", "test", "docs", "chat")
    record: dict[str, Any] = {
        "validation_loss": {
            name: round(
                evaluator.validation_loss(streams[f"held_{name}"], length=length, max_rows=min(64, num_prompts)), 4
            )
            for name in names
        }
    }
    record["acceptance_code"] = asdict(evaluator.acceptance(evaluator.code_prompts(streams["held_code"], num_prompts)))
    record["acceptance_chat"] = asdict(evaluator.acceptance(evaluator.chat_prompts(num_prompts)))
    record["needle"] = {}
    for place, num_lines in enumerate(n * length // FULL_LENGTH for n in NEEDLE_LINES):
        for depth in NEEDLE_DEPTHS:
            for thinking in (False, True) if place == len(NEEDLE_LINES) - 1 else (False,):
                rate, tokens = evaluator.needle_accuracy(
                    depth=depth, num_lines=num_lines, count=max(num_prompts // 4, 1), thinking=thinking
                )
                mode = "thinking" if thinking else "plain"
                record["needle"][f"{num_lines} lines, depth {depth}, {mode}"] = {
                    "accuracy": rate,
                    "prompt_tokens": round(tokens),
                }
    record["chat"] = evaluator.chat_behaviour(count=num_prompts)
    return record


def _rounds(match: list[int], prompt_length: int, text_length: int, draft_length: int) -> list[tuple[int, int]]:
    """Give (position of the last known token, accepted drafts) of each round after the prefill's own token."""
    position, found = prompt_length, []
    while position < text_length - 1:
        run = min(match[position - 1], draft_length, text_length - 1 - position)
        found.append((position, run))
        position += run + 1
    return found


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else str(value)
