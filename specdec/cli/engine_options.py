"""The engine's settings as flags; one that is not given leaves the default of `EngineConfig`."""

from collections.abc import Mapping
from typing import Any

from specdec.cli.option_table import OptionTable, TableOption
from specdec.cli.speculative_aliases import SPECULATION_OPTIONS, is_draft_length_auto, resolve_num_draft_tokens

MODEL_OPTIONS = OptionTable(
    "Model",
    (
        TableOption(
            name="dtype",
            type=str,
            help="What the model computes in: float32 or bfloat16 [default: float32].",
            metavar="DTYPE",
        ),
        TableOption(name="device", type=str, help="Where it runs, as in cpu or cuda:0.", metavar="DEVICE"),
        TableOption(
            name="kernels",
            type=str,
            help="torch or hopper; by default Hopper's kernels where they can compute the model, else torch.",
            metavar="KERNELS",
        ),
        TableOption(name="latent_norm_eps", type=float, help="Eps of the latent norms; else the checkpoint's."),
    ),
)

# Also what plans are made of.
DECODE_RANK_OPTIONS = (
    TableOption(
        name="tp_size",
        type=int,
        help="Tensor-parallel ranks [default: 1].",
        aliases=("--tensor-parallel-size", "-tp"),
    ),
    TableOption(
        name="dcp_size",
        type=int,
        help="Ranks of these that share a request's target pages; divides --tp-size [default: 1].",
        aliases=("--decode-context-parallel-size", "-dcp"),
    ),
)
PAGE_SIZE_OPTION = TableOption(name="page_size", type=int, help="Tokens of a page [default: 64].")

CACHE_OPTIONS = OptionTable(
    "KV cache",
    (
        TableOption(
            name="kv_format",
            type=str,
            help="float32, bfloat16, fp8 or fp8_packed; follows the dtype where not given.",
            metavar="FORMAT",
        ),
        TableOption(name="kv_scale", type=float, help="Scale of format fp8, for every layer; required there."),
        PAGE_SIZE_OPTION,
        TableOption(name="num_pages", type=int, help="Pages of the pool."),
        TableOption(name="max_model_len", type=int, help="Most tokens of a request, prompt and output."),
        TableOption(name="prefill_chunk_tokens", type=int, help="Most prompt tokens of one round [default: 256]."),
    ),
)

SCHEDULE_OPTIONS = OptionTable(
    "Scheduling",
    (
        TableOption(name="max_num_requests", type=int, help="Requests that may run together [default: 16]."),
        TableOption(
            name="prefix_cache", type=bool, switches_off=True, help="Keep no pages for prompts that begin alike."
        ),
    ),
)

DRAFT_OPTIONS = OptionTable(
    SPECULATION_OPTIONS.title,
    (
        TableOption(
            name="acceptance",
            type=str,
            help="sampled (the text of plain decoding) or rejection (its distribution) [default: sampled].",
            metavar="RULE",
        ),
        TableOption(
            name="mtp_index_sharing",
            type=str,
            help="What recycled draft steps attend to: off, anchor or anchor-and-drafts.",
            metavar="MODE",
        ),
    ),
)

SHARE_OPTIONS = (
    *DECODE_RANK_OPTIONS,
    TableOption(
        name="cp_size",
        type=int,
        help="Ranks of a layer split, for prefill: they share rows and layers, --tp-size is 1 [default: 1].",
    ),
    TableOption(
        name="expert_split",
        type=str,
        help="slice (a share of every expert) or expert (whole ones); by slice while its width is a multiple of 128.",
        metavar="SPLIT",
    ),
)

RANK_OPTIONS = OptionTable(
    "Ranks",
    (
        *SHARE_OPTIONS,
        TableOption(
            name="exchange",
            type=str,
            help="How dcp ranks merge attention: packed or gather-scatter [default: packed].",
            metavar="STRATEGY",
        ),
        TableOption(
            name="peer_memory",
            type=bool,
            switches_off=True,
            help="GPUs of one host exchange by NCCL alone, not by writing into each other's memory.",
        ),
        TableOption(
            name="logits_noise",
            type=float,
            help="Noise on the logits that differs from rank to rank, to see that ranks still agree [default: 0.0].",
        ),
        TableOption(
            name="audit_rate",
            type=float,
            help="Share of the rounds in which the ranks' own decisions are compared and counted [default: 0.0].",
            aliases=("--audit",),
        ),
        TableOption(
            name="rank_timeout_s",
            type=float,
            help="Seconds of silence after which a rank counts as lost, once the ranks have started [default: 60.0].",
        ),
    ),
)

TRANSPORT_OPTION = TableOption(
    name="transport",
    type=str,
    help="What KV travels through: local (shared memory of one host), mooncake or nixl; local where not given.",
    metavar="TRANSPORT",
)

DRAFT_KV_OPTION = TableOption(
    name="draft_kv",
    type=bool,
    switches_off=True,
    help="A prefill computes no KV of the MTP layer: decode groups that draft with it are refused.",
)

HANDOFF_OPTIONS = OptionTable(
    "Prompts from prefills",
    (
        TableOption(
            name="prefill",
            type=list[str],
            help="Have prompts computed by the specdec prefill at this address; may be given several times.",
            metavar="HOST:PORT",
        ),
        TRANSPORT_OPTION,
        TableOption(
            name="prefill_timeout_s", type=float, help="Seconds in which a prompt must arrive [default: 120.0]."
        ),
        TableOption(
            name="peer_timeout_s",
            type=float,
            help="Seconds of silence after which a prefill counts as stopped [default: 10.0].",
        ),
    ),
)

ENGINE_OPTIONS = (
    MODEL_OPTIONS,
    RANK_OPTIONS,
    CACHE_OPTIONS,
    SCHEDULE_OPTIONS,
    SPECULATION_OPTIONS,
    DRAFT_OPTIONS,
    HANDOFF_OPTIONS,
)


def engine_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Turn given flags into arguments of `Engine.from_pretrained`.

    Raises:
        ConfigError: Flags contradict each other.
    """
    aliases = {option.name for option in SPECULATION_OPTIONS.options}
    settings = {name: value for name, value in given.items() if name not in aliases}
    num_draft_tokens = resolve_num_draft_tokens(given)
    if num_draft_tokens is not None:
        settings["num_draft_tokens"] = num_draft_tokens
    if is_draft_length_auto(given):
        settings["is_draft_length_auto"] = True
    return settings
