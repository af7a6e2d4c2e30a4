"""The settings of an engine, checked before anything is allocated."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from numbers import Integral, Real

from specdec.dcp.exchange import ExchangeStrategy
from specdec.dcp.layout import KvFormat
from specdec.errors import ConfigError
from specdec.kernel_set import KernelSet
from specdec.models.glm.expert_split import ExpertSplit
from specdec.models.glm.mtp import MtpIndexSharing
from specdec.models.glm.parallel_sizes import fitting_dcp_sizes
from specdec.sampling.accept import AcceptanceRule
from specdec.transfer.line import HEARTBEAT_S, parse_address
from specdec.transfer.transport_name import TransportName


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """How an engine drafts, schedules and stores.

    The fields that are enumerations also take the text of a member, such as acceptance="rejection".

    Attributes:
        num_draft_tokens: K, most drafts per request and round; 0 switches speculation off.
        is_draft_length_auto: Whether each round takes the number of drafts up to K that promises most tokens a second;
            see `specdec.drafting.draft_length`. Else it is always K.
        acceptance: The acceptance rule.
        mtp_index_sharing: What recycled draft steps attend to; None takes the checkpoint's own setting.
        page_size: Tokens of a KV page, a power of two.
        num_pages: Physical target pages of each rank; None is enough for `max_num_requests` requests of full length,
            cut to about 1 GiB but never below one request of full length.
        kv_format: Storage format of the cache; None follows the dtype of the model.
        kv_scale: Scale of the plain FP8 format, for every layer; required by it, refused elsewhere.
        max_num_requests: Requests that may run at the same time.
        max_model_len: Most tokens of a request, prompt and output; None takes the checkpoint's limit.
        prefill_chunk_tokens: Most prompt tokens computed in one round, over all requests.
        prefix_cache: Whether finished pages are kept for prompts that begin alike.
        kernels: What computes the model; None takes Hopper's kernels where they can (`specdec.ranks.kernel_choice`).
        latent_norm_eps: Eps of the latent norms; None takes the checkpoint's `rms_norm_eps`.
        tp_size: Ranks that share heads, MLPs, experts and vocabulary.
        dcp_size: Ranks of these that share the target pages of a request; divides `tp_size`.
        cp_size: Ranks of a layer split, which share the rows of each pass and the layers of the pools: for prefill.
            Each holds all weights and nothing is proposed, so it takes `tp_size` 1 and `num_draft_tokens` 0.
        expert_split: How ranks share the experts; None chooses by the experts' width.
        exchange: How dcp ranks exchange their partial attention.
        peer_memory: Whether GPUs of one host exchange by writing into each other's memory, where all of a group can;
            else all goes by NCCL. The results are the same bits.
        rank_timeout_s: Seconds of silence, or of waiting in a collective, after which a rank counts as lost.
        audit_rate: Share of the rounds in which the ranks' own decisions are compared and counted.
        transport: What KV travels through between engines: local (shared memory of one host), mooncake or nixl; None
            for an engine whose KV goes nowhere.
        prefill: Addresses of prefills, "host:port" each, that compute the prompts; none computes them here.
        prefill_timeout_s: Seconds in which a prompt must arrive, from whichever prefill, once it has pages; and in
            which it must get pages where only a prefill can give them back.
        peer_timeout_s: Seconds of silence after which a prefill counts as stopped; a few signs of life at least.
        logits_noise: Standard deviation of noise on the logits that differs from rank to rank, after they were
            gathered: shows that ranks that see different numbers still decide alike, and that an audit sees them.
    """

    num_draft_tokens: int = 3
    is_draft_length_auto: bool = False
    acceptance: AcceptanceRule = AcceptanceRule.SAMPLED
    mtp_index_sharing: MtpIndexSharing | None = None
    page_size: int = 64
    num_pages: int | None = None
    kv_format: KvFormat | None = None
    kv_scale: float | None = None
    max_num_requests: int = 16
    max_model_len: int | None = None
    prefill_chunk_tokens: int = 256
    prefix_cache: bool = True
    kernels: KernelSet | None = None
    latent_norm_eps: float | None = None
    tp_size: int = 1
    dcp_size: int = 1
    cp_size: int = 1
    expert_split: ExpertSplit | None = None
    exchange: ExchangeStrategy = ExchangeStrategy.PACKED
    peer_memory: bool = True
    rank_timeout_s: float = 60.0
    audit_rate: float = 0.0
    transport: TransportName | None = None
    prefill: tuple[str, ...] = ()
    prefill_timeout_s: float = 120.0
    peer_timeout_s: float = 10.0
    logits_noise: float = 0.0

    def __post_init__(self) -> None:
        for name, kind in _ENUMERATIONS.items():
            if getattr(self, name) is not None or name in ("acceptance", "exchange"):
                object.__setattr__(self, name, _member(kind, getattr(self, name), name=name))
        for name in _INTEGERS:
            self._take(name, _integer)
        self._take_prefill()
        for name in _NUMBERS:
            self._take(name, _number)
        for name in ("prefix_cache", "is_draft_length_auto", "peer_memory"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be true or false, got {getattr(self, name)!r}")
        if self.num_draft_tokens > MAX_DRAFT_TOKENS:
            raise ConfigError(f"num_draft_tokens must lie in 0..{MAX_DRAFT_TOKENS}, got {self.num_draft_tokens}")
        if self.max_model_len == 1:
            raise ConfigError("max_model_len must be >= 2, a prompt token and an output token, got 1")
        if self.latent_norm_eps is not None and not 0 < self.latent_norm_eps < 1:
            raise ConfigError(f"latent_norm_eps must be positive and below 1, got {self.latent_norm_eps}")
        if self.tp_size % self.dcp_size:
            raise ConfigError(
                f"dcp_size must divide tp_size {self.tp_size}, got {self.dcp_size}: dcp ranks are tensor-parallel "
                f"ranks, take one of {', '.join(map(str, fitting_dcp_sizes(self.tp_size)))}"
            )
        if self.cp_size > 1 and self.tp_size > 1:
            raise ConfigError(
                f"cp_size {self.cp_size} and tp_size {self.tp_size} cannot be combined: ranks of a layer split hold "
                "all weights and all pages; set one of them to 1"
            )
        if self.cp_size > 1 and self.num_draft_tokens:
            raise ConfigError(
                f"num_draft_tokens must be 0 where cp_size is {self.cp_size}, got {self.num_draft_tokens}: ranks of a "
                "layer split compute the draft KV of prompts, and propose nothing"
            )
        if self.cp_size > 1 and self.prefill:
            raise ConfigError(
                f"prefill takes cp_size 1, got {self.cp_size}: ranks of a layer split compute prompts themselves; a "
                "decode group takes tp_size and dcp_size"
            )
        if not 0 < self.rank_timeout_s <= MAX_RANK_TIMEOUT_S:
            raise ConfigError(
                f"rank_timeout_s must be positive and at most {MAX_RANK_TIMEOUT_S:g}, got {self.rank_timeout_s}"
            )
        for name, least in (("prefill_timeout_s", 0.0), ("peer_timeout_s", 3 * HEARTBEAT_S)):
            if not least <= getattr(self, name) <= MAX_RANK_TIMEOUT_S or not getattr(self, name):
                raise ConfigError(
                    f"{name} must be {f'at least {least:g}' if least else 'positive'} and at most "
                    f"{MAX_RANK_TIMEOUT_S:g}, got {getattr(self, name)}"
                )
        if not 0 <= self.audit_rate <= 1:
            raise ConfigError(f"audit_rate must lie in 0..1, got {self.audit_rate}")
        if not 0 <= self.logits_noise < 1e6:
            raise ConfigError(f"logits_noise must be >= 0 and below 1e6, got {self.logits_noise}")
        if self.kv_scale is not None and not MIN_KV_SCALE <= self.kv_scale <= MAX_KV_SCALE:
            raise ConfigError(f"kv_scale must be in {MIN_KV_SCALE:g}..{MAX_KV_SCALE:g}, got {self.kv_scale:g}")
        if (self.kv_format is KvFormat.FP8) != (self.kv_scale is not None):
            raise ConfigError(
                f"kv_scale belongs to kv format fp8 and must be given there, even when it is 1.0; got kv format "
                f"{self.kv_format} with kv_scale {self.kv_scale}"
            )

    @property
    def num_ranks(self) -> int:
        """Processes of the engine."""
        return self.tp_size * self.cp_size

    def _take_prefill(self) -> None:
        """Check the addresses of prefills, and choose a transport for them where none was chosen."""
        given: object = self.prefill
        if isinstance(given, str) or not isinstance(given, list | tuple):
            raise ConfigError(f'prefill must be a list of "host:port", as in ["127.0.0.1:7100"], got {given!r}')
        for address in given:
            parse_address(address)
        if len(set(given)) < len(given):
            raise ConfigError(f"prefill names an address twice: {', '.join(given)}")
        object.__setattr__(self, "prefill", tuple(given))
        if given and self.transport is None:
            object.__setattr__(self, "transport", TransportName.LOCAL)

    def _take(self, name: str, read: Callable[[str, object], object]) -> None:
        """Keep what a field reads as; None stays where it is the default."""
        value = getattr(self, name)
        if value is not None or EngineConfig.__dataclass_fields__[name].default is not None:
            object.__setattr__(self, name, read(name, value))


MAX_DRAFT_TOKENS = 32
MAX_RANK_TIMEOUT_S = 86400.0
# Far beyond the values of any latent, and far enough within float32 that no product with an FP8 value leaves it.
MIN_KV_SCALE, MAX_KV_SCALE = 1e-30, 1e30
_INTEGERS = (
    "num_draft_tokens",
    "page_size",
    "num_pages",
    "max_num_requests",
    "max_model_len",
    "prefill_chunk_tokens",
    "tp_size",
    "dcp_size",
    "cp_size",
)
_NUMBERS = (
    "kv_scale",
    "latent_norm_eps",
    "rank_timeout_s",
    "audit_rate",
    "prefill_timeout_s",
    "peer_timeout_s",
    "logits_noise",
)
_ENUMERATIONS: dict[str, type[StrEnum]] = {
    "acceptance": AcceptanceRule,
    "mtp_index_sharing": MtpIndexSharing,
    "kv_format": KvFormat,
    "kernels": KernelSet,
    "expert_split": ExpertSplit,
    "exchange": ExchangeStrategy,
    "transport": TransportName,
}


def _member(kind: type[StrEnum], value: str, *, name: str) -> StrEnum:
    try:
        return kind(value)
    except ValueError:
        raise ConfigError(f"{name} must be one of {', '.join(kind)}, got {value!r}") from None


def _integer(name: str, value: object) -> int:
    smallest = 0 if name == "num_draft_tokens" else 1
    if isinstance(value, bool) or not isinstance(value, Integral) or value < smallest:
        raise ConfigError(f"{name} must be an integer >= {smallest}, got {value!r}")
    return int(value)


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ConfigError(f"{name} must be a number, got {value!r}")
    try:
        return float(value)
    except OverflowError:
        raise ConfigError(f"{name} must be a number that a float can hold") from None
