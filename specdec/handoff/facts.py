"""What two engines must agree on before bytes of one are taken for KV by the other."""

from specdec.errors import TransferError
from specdec.memory.pool_plan import PoolLayouts
from specdec.models.glm.checkpoint import LoadedCheckpoint
from specdec.models.glm.fingerprint import model_fingerprint
from specdec.transfer.messages import PoolFacts


def pool_facts(layouts: PoolLayouts, checkpoint: LoadedCheckpoint, *, latent_norm_eps: float | None) -> PoolFacts:
    """Say what an engine's pages are, and what their values are computed with.

    Args:
        layouts: Of its pools.
        checkpoint: As its leading rank has loaded it.
        latent_norm_eps: As in `EngineConfig`.
    """
    target, draft = layouts.target, layouts.draft

    def weights(*, of_mtp: bool) -> str:
        return model_fingerprint(
            checkpoint.config, checkpoint.parameters, latent_norm_eps=latent_norm_eps, of_mtp=of_mtp
        )

    return PoolFacts(
        target=target.fingerprint,
        draft=None if draft is None else f"{draft.fingerprint} {weights(of_mtp=True)}",
        page_size=target.page_size,
        kv_format=target.kv_format.value,
        model=weights(of_mtp=False),
        memory=checkpoint.parameters["embed_tokens"].device.type,
    )


def check_facts(decode: PoolFacts, prefill: PoolFacts) -> None:
    """Refuse a decode group whose pages are not those of the prefill.

    Raises:
        TransferError: It says what differs, and what to do.
    """
    for name, advice in (
        ("memory", "bytes go from GPU to GPU or from host to host: start both with --device cuda, or both with cpu"),
        ("page_size", "start both with one --page-size"),
        ("kv_format", "start both with one --kv-format"),
        (
            "target",
            "the layouts of their pages differ: start both with the same checkpoint, --kv-format and --kv-scale",
        ),
        (
            "model",
            "they compute with different weights or another rounding: start both with the same checkpoint, --dtype and "
            "--latent-norm-eps",
        ),
    ):
        ours, theirs = getattr(prefill, name), getattr(decode, name)
        if ours != theirs:
            raise TransferError(f"{name} of the decode group is {theirs}, of the prefill {ours}: {advice}")
    if decode.draft is not None and prefill.draft != decode.draft:
        have = "none" if prefill.draft is None else "another one"
        raise TransferError(
            f"the decode group drafts with the MTP layer, the prefill has {have}: start the prefill with the same "
            "checkpoint and without --no-draft-kv, or the decode group with --num-draft-tokens 0"
        )
