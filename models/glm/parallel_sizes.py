"""Which numbers of ranks a model can be spread over: every rule of divisibility and containment in one place."""

from specdec.kernels.errors import ConfigError
from specdec.models.glm.config import GlmConfig
from specdec.models.glm.expert_split import ExpertSplit, choose_expert_split


def check_parallel_sizes(
    config: GlmConfig, *, tp_size: int, dcp_size: int, expert_split: ExpertSplit | None = None
) -> None:
    """Refuse sizes that do not fit each other or the model, before anything is allocated.

    Args:
        config: The model.
        tp_size: Tensor-parallel ranks; they share heads, MLP widths, experts and vocabulary rows.
        dcp_size: Ranks that share the pages of a request; groups of tensor-parallel ranks.
        expert_split: How experts are shared; None asks `choose_expert_split`.

    Raises:
        ConfigError: Names every rule that is broken, and the sizes that would do.
    """
    for name, size in (("tp_size", tp_size), ("dcp_size", dcp_size)):
        if size < 1:
            raise ConfigError(f"{name} must be >= 1, got {size}")
    faults = []
    broken = [f"{name} {total}" for name, total in _shared(config, tp_size, expert_split) if total % tp_size]
    if broken:
        fitting = ", ".join(map(str, fitting_tp_sizes(config, expert_split)))
        faults.append(f"tp_size must divide {', '.join(broken)}, got {tp_size}: take one of {fitting}")
    if tp_size % dcp_size:
        fitting = ", ".join(map(str, fitting_dcp_sizes(tp_size)))
        faults.append(f"dcp_size must divide tp_size {tp_size}, got {dcp_size}: take one of {fitting}")
    if faults:
        raise ConfigError("; ".join(faults))


def fitting_tp_sizes(config: GlmConfig, expert_split: ExpertSplit | None = None) -> tuple[int, ...]:
    """Numbers of tensor-parallel ranks that the model can be spread over, ascending."""
    return tuple(
        size
        for size in range(1, config.num_heads + 1)
        if not any(total % size for _, total in _shared(config, size, expert_split))
    )


def fitting_dcp_sizes(tp_size: int) -> tuple[int, ...]:
    """Sizes of the groups that may share the pages of a request, ascending."""
    return tuple(size for size in range(1, tp_size + 1) if tp_size % size == 0)


def _shared(config: GlmConfig, tp_size: int, expert_split: ExpertSplit | None) -> list[tuple[str, int]]:
    """What the ranks must share evenly, by the names of config.json."""
    shared = [("num_attention_heads", config.num_heads), ("vocab_size", config.vocab_size)]
    if "dense" in config.mlp_layer_types:
        shared.append(("intermediate_size", config.intermediate_size))
    if "sparse" in config.mlp_layer_types or config.num_mtp_layers:
        shared.append(("the shared experts' width", config.shared_intermediate_size))
        if (expert_split or choose_expert_split(config, tp_size)) is ExpertSplit.SLICE:
            shared.append(("moe_intermediate_size", config.moe_intermediate_size))
        else:
            shared.append(("n_routed_experts", config.num_experts))
    return shared
