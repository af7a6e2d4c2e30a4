"""Both acceptance rules draw from the model's own distribution, computed exactly from transformers' logits.

Eight ids are allowed, so the probabilities of all 4096 outputs of four tokens can be listed. Every draw has K = 3
drafts, so that tokens 2, 3 and 4 are judged drafts or replace one. With a grammar some outputs have probability 0, and
many drafts, which know nothing of it, are forbidden.
"""

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from operator import add

import numpy as np
import numpy.typing as npt
import pytest
import torch

from specdec.drafting.draft import DraftSource
from specdec.drafting.scripted_draft import ScriptedDraft
from specdec.grammar.grammar import Grammar
from tests.support.engines import VOCAB_SIZE, Ask, Checkpoints, drawn, greedy, prompt_of, serve
from tests.support.tiny_checkpoint import reference_model

PROMPT = prompt_of(9)
FIRST_LETTER = ord("a") - ord("!")  # the first ids are the bytes from "!" on, in order
GRAMMAR = "[a-d]([cd][a-d]|[ef][e-h])[a-h]"
ALLOWED = tuple(range(10, 18))
NUM_TOKENS = 4
NUM_SLOTS = 128
SMALLEST_P = 1e-3  # chi-square; the seeds are fixed, so a test that passes always passes


def exact_joint(model: torch.nn.Module, *, temperature: float) -> npt.NDArray[np.float64]:
    """Probability of every output of four tokens, [8, 8, 8, 8] by places in `ALLOWED`."""
    contexts = torch.tensor([PROMPT])
    prob_N = torch.ones(1, dtype=torch.float64)
    for _ in range(NUM_TOKENS):
        with torch.inference_mode():
            logits_NV = model(contexts).logits[:, -1].double() / temperature
        prob_N = (prob_N[:, None] * logits_NV[:, ALLOWED].softmax(dim=-1)).flatten()
        next_ids = torch.tensor(ALLOWED).repeat(len(contexts))
        contexts = torch.cat((contexts.repeat_interleave(len(ALLOWED), dim=0), next_ids[:, None]), dim=1)
    joint: npt.NDArray[np.float64] = prob_N.view((len(ALLOWED),) * NUM_TOKENS).numpy()
    return joint


def draw(
    checkpoints: Checkpoints, num_draws: int, *, acceptance: str, temperature: float, draft: str
) -> npt.NDArray[np.int64]:
    """Draws as places in `ALLOWED`, [num_draws, 4]."""
    source: DraftSource | None = None
    if draft != "mtp":
        likely = checkpoints.plain(Ask(PROMPT, greedy(8, allowed_token_ids=ALLOWED)))
        wrong_at = 1 if draft == "second wrong" else None
        source = ScriptedDraft(lambda _: likely, vocab_size=VOCAB_SIZE, wrong_at=wrong_at)
    engine = checkpoints.engine(
        draft_source=source,
        num_draft_tokens=3,
        acceptance=acceptance,
        page_size=1,  # all but the last token of the prompt are computed once
        max_num_requests=NUM_SLOTS,
        max_model_len=32,
        latent_norm_eps=1e-6,
    )
    outputs: list[Sequence[int]] = []
    for seed in range(-(-num_draws // NUM_SLOTS)):
        params = drawn(seed, NUM_TOKENS + 1, n=NUM_SLOTS, temperature=temperature, top_k=8, allowed_token_ids=ALLOWED)
        outputs += [choice.token_ids[:NUM_TOKENS] for choice in serve(engine, [Ask(PROMPT, params)])[0].choices]
    return np.array(outputs[:num_draws]) - ALLOWED[0]


def check(drawn_N4: npt.NDArray[np.int64], joint: npt.NDArray[np.float64], *, largest_distance: float) -> None:
    """Compare every token and every pair of neighbouring tokens with their exact distributions."""
    for token in range(NUM_TOKENS):
        exact, counts = marginal(joint, (token,)), histogram(drawn_N4[:, [token]])
        assert np.abs(counts / len(drawn_N4) - exact).sum() / 2 < largest_distance
        assert chi_square_p(counts, exact) > SMALLEST_P
    for pair in itertools.pairwise(range(NUM_TOKENS)):
        assert chi_square_p(histogram(drawn_N4[:, list(pair)]), marginal(joint, pair)) > SMALLEST_P


def marginal(joint: npt.NDArray[np.float64], kept: tuple[int, ...]) -> npt.NDArray[np.float64]:
    summed: npt.NDArray[np.float64] = joint.sum(axis=tuple(axis for axis in range(NUM_TOKENS) if axis not in kept))
    return summed.ravel()


def histogram(drawn_NX: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    shape = (len(ALLOWED),) * drawn_NX.shape[1]
    cells = np.ravel_multi_index(tuple(drawn_NX.T), shape)
    return np.bincount(cells, minlength=int(np.prod(shape))).astype(np.float64)


def chi_square_p(counts: npt.NDArray[np.float64], exact: npt.NDArray[np.float64]) -> float:
    """How likely a deviation this large is; cells that expect fewer than 5 are taken together."""
    expected = exact * counts.sum()
    small = expected < 5
    counts = np.append(counts[~small], counts[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    statistic = float(((counts - expected) ** 2 / expected).sum())
    degrees = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(degrees, torch.tensor(statistic / 2, dtype=torch.float64)))


@pytest.fixture(scope="module")
def model(checkpoints: Checkpoints) -> torch.nn.Module:
    reference: torch.nn.Module = reference_model(checkpoints.path())
    return reference


@pytest.mark.parametrize(("acceptance", "draft"), [("sampled", "mtp"), ("rejection", "mtp"), ("rejection", "likely")])
def test_some_thousand_draws_follow_the_exact_distribution(
    acceptance: str, draft: str, model: torch.nn.Module, checkpoints: Checkpoints
) -> None:
    draws = draw(checkpoints, 2_048, acceptance=acceptance, temperature=1.0, draft=draft)
    check(draws, exact_joint(model, temperature=1.0), largest_distance=0.05)


@pytest.mark.parametrize("acceptance", ["sampled", "rejection"])
def test_draws_with_a_grammar_follow_the_exact_distribution(
    acceptance: str, model: torch.nn.Module, checkpoints: Checkpoints
) -> None:
    letters = range(FIRST_LETTER, FIRST_LETTER + 8)
    params = drawn(
        0,
        NUM_TOKENS + 1,
        n=NUM_SLOTS,
        grammar=Grammar.regex(GRAMMAR),
        logit_bias=dict.fromkeys(letters, 60.0),  # drafts are letters, half of them wrong ones
    )
    engine = checkpoints.engine(
        num_draft_tokens=3,
        acceptance=acceptance,
        page_size=1,
        max_num_requests=NUM_SLOTS,
        max_model_len=32,
        latent_norm_eps=1e-6,
    )
    outputs: list[Sequence[int]] = []
    for seed in range(16):
        (result,) = serve(engine, [Ask(PROMPT, replace(params, seed=seed))])
        outputs += [choice.token_ids[:NUM_TOKENS] for choice in result.choices]
        stats = reduce(add, (choice.speculation for choice in result.choices))
        assert 0.1 < stats.num_accepted_tokens / stats.num_draft_tokens < 0.8
    check(np.array(outputs) - letters[0], exact_joint_of_grammar(model, letters), largest_distance=0.05)


def exact_joint_of_grammar(model: torch.nn.Module, letters: range) -> npt.NDArray[np.float64]:
    """Probability of every output of four letters, each drawn from those with which a text of the grammar can go on."""
    texts = ["".join(each) for each in itertools.product("abcdefgh", repeat=NUM_TOKENS)]
    beginnings = {text[:length] for text in texts if re.fullmatch(GRAMMAR, text) for length in range(NUM_TOKENS + 1)}
    prob_by_text = {"": 1.0}
    for _ in range(NUM_TOKENS):
        token_ids = [[*PROMPT, *(letters["abcdefgh".index(letter)] for letter in text)] for text in prob_by_text]
        with torch.inference_mode():
            logits_NV = model(torch.tensor(token_ids)).logits[:, -1].double()
        longer: dict[str, float] = {}
        for (text, prob), logits_V in zip(prob_by_text.items(), logits_NV[:, list(letters)], strict=True):
            is_allowed = torch.tensor([text + letter in beginnings for letter in "abcdefgh"])
            probs = logits_V.masked_fill(~is_allowed, -torch.inf).softmax(dim=-1)
            longer |= {text + letter: prob * p for letter, p in zip("abcdefgh", probs.tolist(), strict=True) if p}
        prob_by_text = longer
    return np.array([prob_by_text.get(text, 0.0) for text in texts]).reshape((8,) * NUM_TOKENS)


@pytest.mark.full
@pytest.mark.parametrize("draft", ["mtp", "likely", "second wrong"])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("acceptance", ["sampled", "rejection"])
def test_twenty_thousand_draws_lie_within_two_percent_of_the_exact_distribution(
    acceptance: str, temperature: float, draft: str, model: torch.nn.Module, checkpoints: Checkpoints
) -> None:
    draws = draw(checkpoints, 20_000, acceptance=acceptance, temperature=temperature, draft=draft)
    check(draws, exact_joint(model, temperature=temperature), largest_distance=0.02)
