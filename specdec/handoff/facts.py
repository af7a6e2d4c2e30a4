"""What two engines must agree on before bytes of one are taken for KV by the other."""

import hashlib

import torch

from specdec.errors import TransferError
from specdec.memory.pool_plan import PoolLayouts
from specdec.transfer.messages import PoolFacts

_SAMPLED_ROWS = 16


def pool_facts(layouts: PoolLayouts, *, embedding_VH: torch.Tensor, norm_H: torch.Tensor) -> PoolFacts:
    """Say what an engine's pages are.

    Args:
        layouts: Of its pools.
        embedding_VH: Of the leading rank, which has the first rows however many ranks share it.
        norm_H: The final norm.
    """
    target, draft = layouts.target, layouts.draft
    return PoolFacts(
        target=target.fingerprint,
        draft=None if draft is None else draft.fingerprint,
        page_size=target.page_size,
        kv_format=target.kv_format.value,
        model=_model_fingerprint(embedding_VH, norm_H),
    )


def check_facts(decode: PoolFacts, prefill: PoolFacts) -> None:
    """Refuse a decode group whose pages are not those of the prefill.

    Raises:
        TransferError: It says what differs, and what to do.
    """
    for name, advice in (
        ("page_size", "start both with one --page-size"),
        ("kv_format", "start both with one --kv-format"),
        (
            "target",
            "the layouts of their pages differ: start both with the same checkpoint, --kv-format and --kv-scale",
        ),
        ("model", "they have loaded different weights: start both with the same checkpoint and --dtype"),
    ):
        ours, theirs = getattr(prefill, name), getattr(decode, name)
        if ours != theirs:
            raise TransferError(f"{name} of the decode group is {theirs}, of the prefill {ours}: {advice}")
    if decode.draft is not None and prefill.draft != decode.draft:
        have = "none" if prefill.draft is None else "another one"
        raise TransferError(
            f"the decode group drafts with the MTP layer, the prefill has {have}: start the prefill without "
            "--no-draft-kv, or the decode group with --num-draft-tokens 0"
        )


def _model_fingerprint(embedding_VH: torch.Tensor, norm_H: torch.Tensor) -> str:
    """Tell weights apart by a few that every model has; equal for every number of ranks."""
    digest = hashlib.blake2b(digest_size=16)
    for sample in (embedding_VH[:_SAMPLED_ROWS], norm_H):
        digest.update(sample.float().cpu().numpy().tobytes())
    return digest.hexdigest()
