"""One rank of an engine: its share of the checkpoint, its pools, the models over them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from specdec.dcp.communicator import ParallelGroups, single_rank_groups
from specdec.dcp.layout import KvFormat
from specdec.dcp.pool import KvPool
from specdec.device.decode_round import DecodeRound, RoundPages, RoundSizes
from specdec.device.device_rounds import DeviceRounds
from specdec.drafting.mtp_draft import MtpDraft
from specdec.engine_config import EngineConfig
from specdec.errors import ConfigError
from specdec.kernel_set import KernelSet
from specdec.kernels.cuda_program import as_current
from specdec.memory.kv_plan import KvPlan, plan_kv
from specdec.memory.pools import Pools, allocate_pools
from specdec.memory.rank_memory import RankMemory
from specdec.models.glm.checkpoint import CONFIG_NAME, LoadedCheckpoint, load_checkpoint
from specdec.models.glm.config import GlmConfig
from specdec.models.glm.expert_split import choose_expert_split
from specdec.models.glm.kernel_target import GROUP_ROWS, MAX_ROWS, KernelMtp, KernelTarget
from specdec.models.glm.layer_launches import layer_pages
from specdec.models.glm.mtp import MTP_LAYER, MtpIndexSharing, MtpLayer
from specdec.models.glm.parallel_sizes import check_parallel_sizes
from specdec.models.glm.parameters import TensorParallel
from specdec.models.glm.rank_slices import model_slice
from specdec.models.glm.target import GlmTarget
from specdec.models.glm.weight_bytes import WeightFormat, count_weights
from specdec.ranks.kernel_choice import KernelChoice, choose_kernels
from specdec.ranks.kv_sides import KvSide
from specdec.ranks.rank_transfer import RankTransfer
from specdec.ranks.worker import Worker
from specdec.sampling.accept import AcceptanceRule
from specdec.transfer.transport import Transport, open_transport


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSetup:
    """What a rank needs to load its share of a model: the same on every rank.

    Attributes:
        directory: Of the checkpoint, on every host.
        dtype: Of the parameters.
        device: "cpu", or "cuda" for the GPU of each rank's number on its host.
        config: The engine's settings.
        with_draft: Whether the ranks draft with the MTP layer.
    """

    directory: Path
    dtype: torch.dtype
    device: str
    config: EngineConfig
    with_draft: bool


def load_rank(
    setup: RankSetup,
    parallel: ParallelGroups,
    *,
    device: str,
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[LoadedCheckpoint, Worker]:
    """Load one rank's share and build its worker.

    Args:
        setup: The same on every rank.
        parallel: The groups of this rank.
        device: Of this rank.
        on_progress: Called with the bytes loaded so far and those of all.
    """
    config = setup.config
    model = GlmConfig.from_file(setup.directory / CONFIG_NAME)
    kernels = choose_kernels(model, config, dtype=setup.dtype, device=device)
    share = TensorParallel(rank=parallel.tp.rank, size=parallel.tp.size, expert_split=config.expert_split)
    with as_current(torch.device(device)):  # its staging memory would take room on another GPU, too
        checkpoint = load_checkpoint(
            setup.directory,
            dtype=setup.dtype,
            device=device,
            tensor_parallel=share,
            keep_fp8=kernels.keeps_fp8,
            on_progress=on_progress,
        )
    worker = build_worker(checkpoint, config, with_draft=setup.with_draft, parallel=parallel, kernels=kernels)
    return checkpoint, worker


def build_worker(
    checkpoint: LoadedCheckpoint,
    config: EngineConfig,
    *,
    with_draft: bool,
    parallel: ParallelGroups | None = None,
    kernels: KernelChoice | None = None,
) -> Worker:
    """Allocate a rank's pools and build its models over them.

    Args:
        checkpoint: The rank's share of the model.
        config: The engine's settings.
        with_draft: Whether to draft with the MTP layer.
        parallel: The groups of this rank; None is one rank alone.
        kernels: What computes the model; None takes what the checkpoint was loaded for.

    Raises:
        ConfigError: The checkpoint has no MTP layer to draft with, or the settings do not fit it.
    """
    if with_draft and not checkpoint.report.has_mtp:
        raise ConfigError(
            "the checkpoint has no MTP layer to draft with: pass num_draft_tokens 0 (--num-draft-tokens 0; for "
            "a prefill --no-draft-kv), or use a checkpoint that holds its MTP layer"
        )
    model = checkpoint.config
    parallel = parallel or single_rank_groups()
    check_parallel_sizes(model, tp_size=parallel.tp.size, dcp_size=parallel.dcp.size, expert_split=config.expert_split)
    if kernels is None:
        is_fp8 = any(parameter.dtype is torch.float8_e4m3fn for parameter in checkpoint.parameters.values())
        kernels = KernelChoice(kernels=KernelSet.HOPPER if is_fp8 else KernelSet.TORCH)
    if kernels.kernels is KernelSet.HOPPER:
        config = replace(config, kv_format=KvFormat.FP8_PACKED)
    embedding = checkpoint.parameters["embed_tokens"]
    plan = plan_kv(model, config, dtype=str(embedding.dtype), with_draft=with_draft, cp_rank=parallel.cp.rank)
    transport = None if config.transport is None else open_transport(config.transport)
    try:
        with as_current(embedding.device):
            return _build(checkpoint, config, plan, parallel, transport, kernels=kernels)
    except BaseException:
        if transport is not None:
            transport.close()
        raise


def _build(
    checkpoint: LoadedCheckpoint,
    config: EngineConfig,
    plan: KvPlan,
    parallel: ParallelGroups,
    transport: Transport | None,
    *,
    kernels: KernelChoice,
) -> Worker:
    model, embedding = checkpoint.config, checkpoint.parameters["embed_tokens"]
    allocate = None if transport is None else partial(transport.allocate, device=embedding.device)
    pools = allocate_pools(
        plan.pools,
        dcp_rank=parallel.dcp.rank,
        device=embedding.device,
        cp=parallel.cp if parallel.cp.size > 1 else None,
        allocate=allocate,
    )
    target, mtp = _models(checkpoint, config, plan, parallel, kernels, with_mtp=pools.draft is not None)
    draft = None
    if mtp is not None and pools.draft is not None:
        sharing = config.mtp_index_sharing
        if sharing is None:
            sharing = MtpIndexSharing.ANCHOR if model.index_share_for_mtp else MtpIndexSharing.OFF
        draft = MtpDraft(
            mtp,
            pools.draft,
            rule=config.acceptance,
            num_slots=config.max_num_requests,
            index_sharing=sharing,
        )
    memory = RankMemory(
        weights=count_weights(model, with_mtp=checkpoint.report.has_mtp).rank_bytes(
            WeightFormat.FP8 if kernels.keeps_fp8 else WeightFormat(str(embedding.dtype).removeprefix("torch.")),
            tp_size=parallel.tp.size,
            expert_split=config.expert_split or choose_expert_split(model, parallel.tp.size),
        ),
        pools=plan.pools,
        workspace_bytes=target.memory.nbytes if isinstance(target, KernelTarget) else 0,
    )
    transfer = None
    if transport is not None:
        side = KvSide(
            target=pools.target.layout,
            draft=None if pools.draft is None else pools.draft.layout,
            num_pages=plan.pools.num_pages,
            tp_size=parallel.tp.size,
            dcp_size=parallel.dcp.size,
            cp_size=parallel.cp.size,
        )
        transfer = RankTransfer(transport, side=side, rank=parallel.all_ranks.rank, memory=pools.memory_by_kind)
    new_device_rounds = None
    if isinstance(target, KernelTarget) and _decodes_on_device(config, with_draft=draft is not None):
        new_device_rounds = partial(_device_rounds, target, pools, draft, config, max_positions=plan.max_model_len)
    return Worker(
        target,
        pools.target,
        draft,
        rule=config.acceptance,
        kernels=kernels,
        memory=memory,
        new_device_rounds=new_device_rounds,
        transfer=transfer,
        logits_noise=config.logits_noise,
    )


def _models(
    checkpoint: LoadedCheckpoint,
    config: EngineConfig,
    plan: KvPlan,
    parallel: ParallelGroups,
    kernels: KernelChoice,
    *,
    with_mtp: bool,
) -> tuple[GlmTarget | KernelTarget, MtpLayer | KernelMtp | None]:
    """Build the models of a rank from its parameters."""
    model, parameters, eps = checkpoint.config, checkpoint.parameters, config.latent_norm_eps
    if kernels.kernels is KernelSet.TORCH:
        target = GlmTarget(model, parameters, latent_norm_eps=eps, parallel=parallel, exchange=config.exchange)
        return target, MtpLayer(model, parameters, target, latent_norm_eps=eps) if with_mtp else None
    tp = parallel.tp
    slices = model_slice(model, parameters, max_rows=MAX_ROWS, tp_rank=tp.rank, tp_size=tp.size)
    fast_target = KernelTarget(model, slices, parallel=parallel, max_positions=plan.max_model_len)
    return fast_target, KernelMtp(fast_target) if with_mtp else None


def _decodes_on_device(config: EngineConfig, *, with_draft: bool) -> bool:
    """Whether rounds may stay on the device: they draft K tokens each with the MTP layer, and draw by its rule."""
    drafts_alike = not config.is_draft_length_auto and with_draft == (config.num_draft_tokens > 0)
    draws_alike = config.acceptance is AcceptanceRule.SAMPLED and not config.logits_noise
    return drafts_alike and draws_alike and config.num_draft_tokens < GROUP_ROWS


def _device_rounds(
    target: KernelTarget, pools: Pools, draft: MtpDraft | None, config: EngineConfig, *, max_positions: int
) -> DeviceRounds:
    """Make the rounds that stay on the device, without their graphs."""
    assert isinstance(pools.target, KvPool)
    draft_pages = None
    if draft is not None:
        assert isinstance(pools.draft, KvPool)
        draft_pages = layer_pages(pools.draft)[MTP_LAYER]
    return DeviceRounds(
        DecodeRound(
            target.model,
            RoundPages(target=layer_pages(pools.target), draft=draft_pages),
            RoundSizes(
                num_requests=min(config.max_num_requests, MAX_ROWS // (config.num_draft_tokens + 1)),
                num_draft_tokens=config.num_draft_tokens,
                max_positions=max_positions,
                with_noise=True,
            ),
            index_sharing=MtpIndexSharing.OFF if draft is None else draft.index_sharing,
            tp=target.parallel.tp,
            dcp=target.parallel.dcp,
            memory=target.memory,
        )
    )
