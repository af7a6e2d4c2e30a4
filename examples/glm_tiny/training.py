"""The training run: phases by elapsed share, checkpoints on the way, evaluation at the end."""

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from .batches import BatchSource
from .build_data import TokenStream
from .checkpoint import load_checkpoint, save_checkpoint
from .evaluation import Evaluator, evaluate
from .model import TinyModel
from .model_config import TinyConfig
from .objective import Objective, Phase
from .optimiser import Optimiser, balance_experts, lr_factor
from .vocabulary import END_TOKENS, require_id

MTP_WEIGHT = 0.4
REPORT_EVERY, SAVE_EVERY_S = 100, 60.0


def phases(config: TinyConfig, *, tokens_per_step: int) -> list[tuple[float, Phase]]:
    """Give (share of the run at which it ends, phase): short and dense first, long and sparse last."""
    full = config.max_position_embeddings
    half = full // 2

    def phase(length: int, steps: int, *, align: bool, sparse: bool) -> Phase:
        return Phase(
            length=length,
            num_rows=max(tokens_per_step // length, 1),
            num_draft_steps=steps,
            align_indexer=align,
            sparse=sparse,
        )

    return [
        (0.22, phase(half, 1, align=False, sparse=False)),
        (0.40, phase(half, 3, align=True, sparse=False)),
        (0.62, phase(full, 3, align=True, sparse=False)),
        (1.00, phase(full, 4, align=True, sparse=True)),
    ]


def train(
    config: TinyConfig,
    streams: Mapping[str, TokenStream],
    tokenizer: Tokenizer,
    out: Path,
    *,
    device: str,
    minutes: float,
    max_steps: int | None,
    tokens_per_step: int,
    seed: int = 0,
) -> None:
    """Train for `minutes` (or `max_steps`) and leave the checkpoint in `out`; a copy is written every minute."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    on_gpu = device.startswith("cuda")
    if on_gpu:
        torch.backends.cuda.matmul.allow_tf32 = True
        torch._dynamo.config.recompile_limit = 64
    model = TinyModel(config, compute_dtype=torch.bfloat16 if on_gpu else torch.float32).to(device)
    if on_gpu:
        model.compile_stages()
    objective, optimiser = Objective(model, compiled=on_gpu), Optimiser(model)
    end_ids = tuple(require_id(tokenizer, token) for token in END_TOKENS)
    num_parameters = sum(p.numel() for p in model.parameters())
    print(f"{num_parameters:,} parameters on {device}", flush=True)

    source: BatchSource | None = None
    source_length = 0
    begin = last_save = last_report = time.monotonic()
    schedule = phases(config, tokens_per_step=tokens_per_step)
    step = num_tokens = 0
    while True:
        elapsed = time.monotonic() - begin
        progress = max(elapsed / (60 * minutes), step / max_steps if max_steps else 0.0)
        if progress >= 1.0:
            break
        phase = next(p for end, p in schedule if progress < end)
        if source is None or source_length != phase.length:
            source = BatchSource(streams, length=phase.length, device=device, seed=seed + phase.length)
            source_length = phase.length
        ids, weights = source.draw(phase.num_rows)
        losses = objective(ids, weights, phase, generator)
        (losses.trunk + MTP_WEIGHT * losses.drafting + losses.alignment).backward()
        factor = lr_factor(step, progress)
        balance_experts(model, losses.loads_LE, factor)
        optimiser.step(factor)
        step += 1
        num_tokens += phase.num_rows * phase.length
        if step % REPORT_EVERY == 0 or step in (1, 10, 30):
            values = (losses.trunk.item(), losses.drafting.item(), losses.alignment.item())
            if any(map(math.isnan, values)):
                raise RuntimeError(f"step {step}: the loss is not a number: {values}")
            now = time.monotonic()
            peak_load = float((losses.loads_LE.max(-1).values / losses.loads_LE.mean(-1)).mean())
            print(
                f"step {step} {progress:.2f} trunk {values[0]:.3f} draft {values[1]:.3f} align {values[2]:.3f}"
                f" load {peak_load:.2f} {num_tokens / 1e6:.1f}M tokens, {now - last_report:.1f} s since the last line",
                flush=True,
            )
            last_report = now
        if time.monotonic() - last_save > SAVE_EVERY_S:
            save_checkpoint(model, out, end_ids=end_ids, pad_id=end_ids[0])
            last_save = time.monotonic()
    save_checkpoint(model, out, end_ids=end_ids, pad_id=end_ids[0])
    print(f"trained {step} steps, {num_tokens / 1e6:.1f}M tokens in {time.monotonic() - begin:.0f} s", flush=True)


def measure(
    config: TinyConfig,
    streams: dict[str, TokenStream],
    tokenizer: Tokenizer,
    out: Path,
    *,
    device: str,
    num_prompts: int,
) -> dict[str, Any]:
    """Evaluate the saved bfloat16 weights in float32 and write figures.json."""
    if device.startswith("cuda"):
        torch.backends.cuda.matmul.allow_tf32 = False
    model = load_checkpoint(out, config, device=device)
    evaluator = Evaluator(model, tokenizer, device=device)
    record = evaluate(evaluator, streams, num_prompts=num_prompts, length=config.max_position_embeddings)
    (out / "figures.json").write_text(json.dumps(record, indent=2) + "\n")
    return record
