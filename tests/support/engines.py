"""Tiny engines for tests: their checkpoints, requests with their plain outputs, and draft sources that know them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specdec.assembly import build_core
from specdec.core import EngineCore
from specdec.dcp.layout import KvFormat
from specdec.dcp.metadata import build_metadata
from specdec.dcp.pool import KvPool
from specdec.drafting.draft import DraftBatch, Drafts, DraftSource, ObservedRows
from specdec.drafting.mtp_draft import MtpDraft
from specdec.drafting.scripted_draft import ScriptedDraft
from specdec.engine import Engine
from specdec.engine_config import EngineConfig
from specdec.models.glm.checkpoint import LoadedCheckpoint, load_checkpoint
from specdec.models.glm.mtp import MTP_LAYER
from specdec.ranks.passes import Ranks
from specdec.ranks.rank_setup import build_worker
from specdec.request import Request, RequestUpdate
from specdec.result import GenerationResult
from specdec.sampling.finish import FinishRule, OutputJudge
from specdec.sampling.sampling_params import SamplingParams
from specdec.sampling.sampling_rows import RequestSampling
from specdec.text.tokenizer import Tokenizer
from tests.support.tiny_checkpoint import TinySpec, read_tensors, tiny_spec, write_shards, write_tiny_checkpoint

# Two layers, the second without an indexer, and one MTP layer: a round takes milliseconds. 8 slots are chosen.
SPARSE = tiny_spec(
    num_layers=2,
    indexer_types=("full", "shared"),
    hidden_size=64,
    num_heads=4,
    q_lora_rank=32,
    intermediate_size=96,
    moe_intermediate_size=32,
    num_experts=4,
    index_num_heads=4,
)
# What eight ranks can share.
PARALLEL = replace(SPARSE, num_heads=8, num_experts=8)
SPECS: Mapping[str, TinySpec] = {
    "sparse": SPARSE,
    "dense": replace(SPARSE, index_topk=128),
    "long": replace(SPARSE, max_position_embeddings=1024),
    "without_mtp": replace(SPARSE, mtp=False),
    "parallel": PARALLEL,
    "parallel_long": replace(PARALLEL, max_position_embeddings=1200),
}
VOCAB_SIZE = SPARSE.vocab_size
FIRST_SPECIAL_ID = SPARSE.first_special_id


def write_engine_checkpoint(path: Path, spec: TinySpec, *, branch_gain: float = 0.35) -> Path:
    """Write a checkpoint whose MTP layer is right now and then, so that runs of every length are accepted.

    What the layers add to the residual stream is scaled by `branch_gain`: the next token then depends mostly on the
    last one, which the MTP layer sees as the target does. FP8 weights are scaled through their scales.
    """
    write_tiny_checkpoint(path, replace(spec, num_shards=1))
    tensors = read_tensors(path)
    scaled = "weight_scale_inv" if spec.weights == "fp8" else "weight"
    for name, tensor in tensors.items():
        if name.endswith((f"o_proj.{scaled}", f"down_proj.{scaled}")):
            tensor.mul_(branch_gain)
        elif name.endswith("eh_proj.weight"):
            tensor[:, spec.hidden_size :].mul_(branch_gain)
    write_shards(path, tensors, num_shards=spec.num_shards)
    return path


class Checkpoints:
    """Checkpoints of `SPECS`, written and loaded once each."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._loaded: dict[tuple[str, torch.dtype], LoadedCheckpoint] = {}
        self._plain: dict[tuple[str, ...], tuple[int, ...]] = {}

    def path(self, name: str = "sparse") -> Path:
        path = self._directory / name
        if not path.exists():
            write_engine_checkpoint(path, SPECS[name])
        return path

    def load(self, name: str = "sparse", dtype: torch.dtype = torch.float32) -> LoadedCheckpoint:
        if (name, dtype) not in self._loaded:
            self._loaded[name, dtype] = load_checkpoint(self.path(name), dtype=dtype)
        return self._loaded[name, dtype]

    def tokenizer(self) -> Tokenizer:
        return Tokenizer(self.path() / "tokenizer.json")

    def engine(self, name: str = "sparse", *, draft_source: DraftSource | None = None, **settings: Any) -> Engine:
        """An engine that can write text, with small pages and a small context unless the settings say otherwise."""
        config = EngineConfig(**{"page_size": 4, "max_model_len": 128, **settings})
        return Engine(self.load(name), config, tokenizer=self.tokenizer(), draft_source=draft_source)

    def plain(
        self, ask: "Ask", name: str = "sparse", *, dtype: torch.dtype = torch.float32, **settings: Any
    ) -> tuple[int, ...]:
        """What decoding gives an ask that is alone, without drafts, its prompt in one piece, nothing cached before.

        This is the definition of the right output. Kept, so that each is computed once.
        """
        key = (name, str(dtype), repr(ask), repr(settings))
        if key not in self._plain:
            config = EngineConfig(
                **{
                    "num_draft_tokens": 0,
                    "page_size": 16,
                    "prefill_chunk_tokens": 512,
                    "max_model_len": 128,
                    **settings,
                }
            )
            self._plain[key] = serve(Engine(self.load(name, dtype), config), [ask])[0].token_ids
        return self._plain[key]


@dataclass(frozen=True)
class Ask:
    """A prompt and what is asked of it."""

    prompt: tuple[int, ...]
    params: SamplingParams

    @property
    def key(self) -> tuple[tuple[int, ...], int | None]:
        """What tells it from the other asks of a test."""
        return self.prompt, self.params.seed


def greedy(max_tokens: int, **asked: Any) -> SamplingParams:
    """The most likely tokens, whatever they are."""
    return SamplingParams(**{"temperature": 0.0, "seed": 0, "max_tokens": max_tokens, "ignore_eos": True, **asked})


def drawn(seed: int, max_tokens: int, **asked: Any) -> SamplingParams:
    """Tokens drawn at temperature 1."""
    return SamplingParams(**{"temperature": 1.0, "seed": seed, "max_tokens": max_tokens, "ignore_eos": True, **asked})


def prompt_of(length: int, *, seed: int = 0) -> tuple[int, ...]:
    """Ordinary token ids without a pattern."""
    ids: list[int] = np.random.default_rng((seed, length)).integers(0, FIRST_SPECIAL_ID, size=length).tolist()
    return tuple(ids)


def serve(engine: Engine, asks: Sequence[Ask]) -> list[GenerationResult]:
    """Serve all asks at the same time."""
    return engine.generate([ask.prompt for ask in asks], [ask.params for ask in asks])


def tokens(results: Sequence[GenerationResult]) -> list[tuple[int, ...]]:
    return [result.token_ids for result in results]


Script = Callable[[Request], Sequence[int]]


def script_of(asks: Sequence[Ask], outputs: Sequence[Sequence[int]]) -> Script:
    """The known output of whatever request is asked about, found by prompt and seed; nothing for other requests."""
    output_by_key = {ask.key: tuple(output) for ask, output in zip(asks, outputs, strict=True)}
    return lambda request: output_by_key.get((tuple(request.prompt_ids.tolist()), request.params.seed), ())


def flipping_draft(script: Script, *, right: float, seed: int) -> ScriptedDraft:
    """Proposes the script with each token replaced at random, so that runs of every length are kept."""

    def continuation(request: Request) -> Sequence[int]:
        output = np.array(script(request), dtype=np.int64)
        generator = np.random.default_rng((seed, len(request.prompt_ids), request.params.seed or 0))
        is_wrong = generator.random(len(output)) >= right
        shifted: list[int] = np.where(is_wrong, (output + 1) % VOCAB_SIZE, output).tolist()
        return shifted

    return ScriptedDraft(continuation, vocab_size=VOCAB_SIZE)


class RaggedDraft(ScriptedDraft):
    """Proposes as many tokens of a script as it likes, often none."""

    def __init__(self, script: Script, *, seed: int) -> None:
        super().__init__(script, vocab_size=VOCAB_SIZE)
        self._generator = np.random.default_rng(seed)

    def propose(self, batch: DraftBatch) -> Drafts:
        drafts = super().propose(batch)
        num_drafts_B = self._generator.integers(0, drafts.num_drafts_B + 1)
        no_token_BK = np.arange(drafts.token_id_BK.shape[1]) >= num_drafts_B[:, None]
        return Drafts(token_id_BK=np.where(no_token_BK, 0, drafts.token_id_BK), num_drafts_B=num_drafts_B)


class CoreRun:
    """An engine's core driven round by round, with its slots and pools in reach."""

    def __init__(
        self,
        checkpoint: LoadedCheckpoint,
        *,
        draft_source: DraftSource | None = None,
        ranks: Ranks | None = None,
        **settings: Any,
    ) -> None:
        self.config = EngineConfig(**{"page_size": 4, "max_model_len": 128, **settings})
        if ranks is None:
            with_draft = self.config.num_draft_tokens > 0 and draft_source is None
            ranks = Ranks(build_worker(checkpoint, self.config, with_draft=with_draft))
        self.core: EngineCore = build_core(ranks, self.config, draft_source=draft_source)
        self.vocab_size = checkpoint.config.vocab_size
        self.requests: list[Request] = []
        self.updates: list[list[RequestUpdate]] = []

    @property
    def mtp_draft(self) -> MtpDraft:
        draft = self.core.ranks.worker.draft
        assert draft is not None
        return draft

    @property
    def target_pool(self) -> KvPool:
        return self.core.ranks.worker.pool

    def add(self, ask: Ask, **fields: Any) -> Request:
        """Put a request into the waiting queue; `fields` are more of `Request`."""
        params = ask.params.with_fresh_seed()
        room = self.config.max_model_len or 0
        rule = FinishRule.of(params, eos_token_ids=(), max_tokens=room - len(ask.prompt))
        updates: list[RequestUpdate] = []
        request = Request(
            request_id=len(self.requests),
            prompt_ids=np.array(ask.prompt, dtype=np.int64),
            params=params,
            choice_index=0,
            limit=len(ask.prompt) + rule.max_tokens,
            stop_ids=rule.stop_ids,
            sampling=RequestSampling(
                params, choice=0, prompt_ids=ask.prompt, stop_ids=rule.stop_ids, vocab_size=self.vocab_size
            ),
            judge=OutputJudge(params, rule, None),
            on_update=updates.append,
            **fields,
        )
        self.requests.append(request)
        self.updates.append(updates)
        self.core.scheduler.waiting.add(request)
        return request

    def poison(self) -> None:
        """Fill all KV memory with NaN, so that a row that was never written shows."""
        for pool in (self.target_pool, self.mtp_draft.pool):
            for entry in pool.layout.entries:
                pool.buffer(entry.kind).fill_(0xFF)

    def step(self) -> bool:
        with torch.inference_mode():
            return self.core.step()

    def step_until_decoding(self, request: Request) -> None:
        """Run rounds until the request has drawn a token since its admission."""
        while request.slot is None or not self.core.slots.decoding_S[request.slot]:
            assert self.step()

    def known_ids(self, request: Request) -> tuple[int, ...]:
        """Prompt and output of a request that holds a slot."""
        slots = self.core.slots
        known: list[int] = slots.token_SX[request.slot, : slots.length_S[request.slot]].tolist()
        return tuple(known)

    def kv(self, request: Request, pool: KvPool, *, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents and index keys of the rows of a request whose KV is valid, by position."""
        assert request.slot is not None
        slots, slot_1 = self.core.slots, np.array([request.slot])
        num_rows = int(slots.computed_S[request.slot])
        position_T = np.arange(num_rows)
        metadata = build_metadata(
            geometry=pool.geometry,
            page_size=pool.layout.page_size,
            num_pages=pool.num_pages,
            request_index=np.zeros(num_rows, dtype=np.int64),
            position=position_T,
            page_table=slots.page_ids(slot_1),
        )
        row_T1 = metadata.rows_of(torch.from_numpy(position_T)[:, None])
        latent_TX = pool.gather_latent(layer, row_T1)[:, 0]
        return latent_TX, pool.gather_index_keys(layer, metadata)[0, :num_rows]

    def draft_kv(self, request: Request) -> tuple[torch.Tensor, torch.Tensor]:
        return self.kv(request, self.mtp_draft.pool, layer=MTP_LAYER)

    def target_kv(self, request: Request) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the first layer, which has an indexer."""
        return self.kv(request, self.target_pool, layer=0)

    def finish(self) -> list[tuple[int, ...]]:
        """Run until nothing is left; gives the tokens delivered to each request."""
        while self.step():
            pass
        return self.delivered()

    def delivered(self) -> list[tuple[int, ...]]:
        return [tuple(token_id for update in updates for token_id in update.token_ids) for updates in self.updates]


def kv_settings(kv_format: KvFormat | None) -> dict[str, Any]:
    """Settings of a KV format, with the scale that plain FP8 asks for."""
    return {"kv_format": kv_format, "kv_scale": 0.03 if kv_format is KvFormat.FP8 else None}


class RecordedDrafts:
    """Stands before a core's draft source and keeps what it proposed."""

    def __init__(self, source: DraftSource) -> None:
        self.source = source
        self.token_ids: list[list[list[int]]] = []

    @classmethod
    def of(cls, run: CoreRun) -> "RecordedDrafts":
        assert run.core.draft is not None
        recorded = cls(run.core.draft)
        run.core.draft = recorded
        return recorded

    def observe(self, rows: ObservedRows) -> None:
        self.source.observe(rows)

    def propose(self, batch: DraftBatch) -> Drafts:
        drafts = self.source.propose(batch)
        pairs = zip(drafts.token_id_BK.tolist(), drafts.num_drafts_B.tolist(), strict=True)
        self.token_ids.append([row[:count] for row, count in pairs])
        return drafts


def plain_logprobs(checkpoint: LoadedCheckpoint, token_ids: Sequence[int]) -> list[float]:
    """Log-probability of every token but the first, from one pass over all."""
    config = EngineConfig(num_draft_tokens=0, prefill_chunk_tokens=512)
    return list(Engine(checkpoint, config).score(token_ids).logprobs)


def plain_logits(checkpoint: LoadedCheckpoint, token_ids: Sequence[int]) -> torch.Tensor:
    """The model's logits of every row, from one pass over all: float32 [T, V]."""
    config = EngineConfig(num_draft_tokens=0, prefill_chunk_tokens=512)
    return Engine(checkpoint, config).trace(token_ids)[0]
