"""Sessions of agents from the trace files, shortened to what a tiny model holds."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from specdec.bench.length_scale import LengthScale
from specdec.bench.prompt_writer import PromptForm, PromptWriter, ReplyContent
from specdec.bench.traces.read_workload import read_workload
from specdec.bench.workload import Workload

_DATA = Path(__file__).parents[2] / "benchmarks" / "data"


@dataclass(frozen=True, slots=True)
class SessionRequest:
    """One request of a session, with the reply that it got.

    Attributes:
        prompt: Token ids.
        num_output_tokens: How many it asks for.
        reply: What it got.
    """

    prompt: tuple[int, ...]
    num_output_tokens: int
    reply: tuple[int, ...]


def agent_sessions(*, divisor: float, max_context: int) -> Workload:
    """Two sessions of coding agents, one with sub-agents; prompts share blocks, and hold no replies of ours."""
    return _read("agent_sessions.jsonl", divisor=divisor, max_context=max_context)


def conversations(*, divisor: float, max_context: int) -> Workload:
    """Sessions whose prompts consist of all earlier prompts and replies, with something new behind each."""
    return _read("tracelab_sessions.jsonl", divisor=divisor, max_context=max_context)


Answer = Callable[[tuple[int, ...], int], Sequence[int]]


def replay(workload: Workload, answer: Answer, *, vocab_size: int, seed: int = 0) -> Iterator[list[SessionRequest]]:
    """Ask everything, one after the other, a session at a time; other seeds give sessions that share nothing.

    Args:
        workload: What to ask.
        answer: Gives the reply to a prompt, of a number of tokens.
        vocab_size: Prompts are made of the ids below it.
        seed: Of the filler.
    """
    writer = PromptWriter(PromptForm.IDS, vocabulary=range(vocab_size), num_blocks=workload.num_blocks, seed=seed)
    for session in workload.sessions:
        asked: list[SessionRequest] = []
        replies: dict[int, ReplyContent] = {}
        for request in session.requests:
            prompt = tuple(writer.write(request, replies)["prompt"])
            reply = tuple(answer(prompt, request.num_output_tokens))
            replies[request.index] = ReplyContent(text="", token_ids=reply)
            asked.append(SessionRequest(prompt, request.num_output_tokens, reply))
        yield asked


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Count the tokens with which both begin."""
    for place, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return place
    return min(len(first), len(second))


def _read(name: str, *, divisor: float, max_context: int) -> Workload:
    workload = read_workload(_DATA / name, scale=LengthScale(divisor), num_output_tokens=None)
    return workload.limited(max_context=max_context)
