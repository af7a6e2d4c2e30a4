"""The last stage: only the indexers learn, while everything they serve stands still.

Sparse training moves the attention and its indexer at once, and the indexer lags. With the model fixed a minute closes
most of the gap, which is what finding one line among hundreds needs.
"""

import time
from collections.abc import Mapping
from pathlib import Path

import torch
from tokenizers import Tokenizer

from .batches import BatchSource
from .build_data import TokenStream
from .checkpoint import load_checkpoint, save_checkpoint
from .model_config import TinyConfig
from .objective import Objective, Phase
from .vocabulary import END_TOKENS, require_id

ALIGNMENT_MIXTURE = {"code": 0.2, "test": 0.15, "docs": 0.1, "chat": 0.2, "needle": 0.35}
PEAK_LR, WARM_UP_STEPS, FINAL_FACTOR = 4e-3, 20, 0.02
NUM_DRAFT_STEPS = 3
REPORT_EVERY = 100


def align_indexers(
    config: TinyConfig,
    streams: Mapping[str, TokenStream],
    tokenizer: Tokenizer,
    source: Path,
    out: Path,
    *,
    device: str,
    minutes: float,
    max_steps: int | None,
    num_rows: int,
    seed: int = 1,
) -> None:
    """Read the checkpoint in `source`, train its indexers for `minutes` (or `max_steps`) and write it to `out`.

    An indexer that `config` asks for and the checkpoint lacks starts from random weights.
    """
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    on_gpu = device.startswith("cuda")
    dtype = torch.bfloat16 if on_gpu else torch.float32
    model = load_checkpoint(source, config, device=device, compute_dtype=dtype, new_indexers=True)
    if on_gpu:
        torch.backends.cuda.matmul.allow_tf32 = True
        model.compile_stages()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".indexer." in name)
    trained = [p for p in model.parameters() if p.requires_grad]
    adam = torch.optim.AdamW(trained, lr=PEAK_LR, betas=(0.9, 0.98), weight_decay=0.01, fused=on_gpu)
    objective = Objective(model, compiled=on_gpu)
    length = config.max_position_embeddings
    phase = Phase(length=length, num_rows=num_rows, num_draft_steps=NUM_DRAFT_STEPS, align_indexer=True, sparse=True)
    batches = BatchSource(streams, length=length, device=device, seed=seed, mixture=ALIGNMENT_MIXTURE)
    begin, step = time.monotonic(), 0
    while True:
        progress = max((time.monotonic() - begin) / (60 * minutes), step / max_steps if max_steps else 0.0)
        if progress >= 1.0:
            break
        for group in adam.param_groups:
            group["lr"] = PEAK_LR * min(1.0, (step + 1) / WARM_UP_STEPS) * max(FINAL_FACTOR, 1.0 - progress)
        ids, weights = batches.draw(phase.num_rows)
        loss = objective.alignment(ids, weights, phase, generator)
        loss.backward()
        adam.step()
        adam.zero_grad(set_to_none=True)
        step += 1
        if step % REPORT_EVERY == 0 or step in (1, 10):
            print(f"align step {step} {progress:.2f} loss {loss.item():.4f}", flush=True)
    end_ids = tuple(require_id(tokenizer, token) for token in END_TOKENS)
    save_checkpoint(model, out, end_ids=end_ids, pad_id=end_ids[0])
    print(f"aligned {step} steps in {time.monotonic() - begin:.0f} s", flush=True)
