"""What a case of the kernel benchmarks reports."""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseResult:
    """One shape of one case.

    Attributes:
        case: Name of the case, such as "sparse_mla_tp8".
        shape: What was run, in the words of the case: "T=96, 8 heads".
        ours_us: Time of our kernel.
        floor_us: What the hardware allows, by the rates of `benchmarks.kernel_cases.rates`.
        peers_us: Times of others by name; a peer that cannot run the shape is left out.
        error: Largest relative error of ours against float64.
        note: What a reader must know.
    """

    case: str
    shape: str
    ours_us: float
    floor_us: float
    error: float
    peers_us: dict[str, float] = field(default_factory=dict)
    note: str = ""
