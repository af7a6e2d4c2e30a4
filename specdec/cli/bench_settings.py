"""From the options of `specdec bench` to a workload and the settings of a benchmark."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec.bench.arrivals import ArrivalKind, Arrivals
from specdec.bench.benchmark import BenchSettings
from specdec.bench.length_scale import LengthScale
from specdec.bench.measure import Objectives
from specdec.bench.prompt_writer import PromptForm
from specdec.bench.synthetic import SyntheticLengths, make_synthetic
from specdec.bench.traces.read_workload import read_workload
from specdec.bench.workload import Workload
from specdec.errors import ConfigError

_SYNTHETIC_NEEDS = ("num_requests", "input_tokens", "output_tokens")


def make_workload(path: Path | None, synthetic: Mapping[str, Any], limits: Mapping[str, Any], *, seed: int) -> Workload:
    """Read the file, or make prompts of the lengths that were asked for, and keep what the limits leave.

    Raises:
        ConfigError: Options do not go together, or the file cannot be read.
        RequestError: The file is not as its format says.
    """
    for name in ("max_requests", "max_context"):
        if (value := limits.get(name)) is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if path is None:
        workload = _make_synthetic(synthetic, limits, seed=seed)
    else:
        lengths = dict(synthetic)
        num_output_tokens = lengths.pop("output_tokens", None)
        if lengths:
            raise ConfigError(f"{_flags(lengths)}: for synthetic prompts; {path} has its own: leave out one of them")
        scale = LengthScale(limits.get("scale_length", 1.0))
        workload = read_workload(path, scale=scale, num_output_tokens=num_output_tokens)
    return workload.limited(max_requests=limits.get("max_requests"), max_context=limits.get("max_context"))


def _make_synthetic(synthetic: Mapping[str, Any], limits: Mapping[str, Any], *, seed: int) -> Workload:
    missing = [name for name in _SYNTHETIC_NEEDS if name not in synthetic]
    if missing:
        raise ConfigError(f"give a workload file, or {_flags(_SYNTHETIC_NEEDS)} for synthetic prompts")
    if limits:
        raise ConfigError(f"{_flags(limits)}: for a workload file; synthetic prompts are as many and as long as asked")
    lengths = {name: value for name, value in synthetic.items() if name != "length_spread"}
    return make_synthetic(SyntheticLengths(**lengths, spread=synthetic.get("length_spread", 0.0)), seed=seed)


def make_settings(
    workload: Workload,
    *,
    source: str,
    model: str | None,
    arrivals: Mapping[str, Any],
    requests: Mapping[str, Any],
    objectives: Mapping[str, Any],
    scale_length: float,
) -> BenchSettings:
    """Put the other options together.

    Raises:
        ConfigError: One of them cannot be used, or not with the others.
    """
    extra_body = requests.get("extra_body", {})
    timeout_s = requests.get("timeout", 600.0)
    num_warmup = requests.get("warmup", 0)
    vocab_size = requests.get("vocab_size")
    seed = requests.get("seed", 0)
    if not timeout_s > 0:
        raise ConfigError(f"--timeout must be above 0 seconds, got {timeout_s}")
    if num_warmup < 0:
        raise ConfigError(f"--warmup must be at least 0, got {num_warmup}")
    if vocab_size is not None and vocab_size < 2:
        raise ConfigError(f"--vocab-size must be at least 2, got {vocab_size}")
    if not 0 <= seed < 2**63:
        raise ConfigError(f"--seed must be at least 0 and below 2**63, got {seed}")
    form = requests.get("prompt_form")
    kind = ArrivalKind(arrivals.get("arrivals", ArrivalKind.TRACE if workload.has_times else ArrivalKind.CLOSED))
    return BenchSettings(
        arrivals=Arrivals(
            kind=kind,
            rate_per_s=arrivals.get("rate"),
            concurrency=arrivals.get("concurrency", 1 if kind is ArrivalKind.CLOSED else None),
            speed=arrivals.get("speed", 1.0),
            max_think_time_s=arrivals.get("max_think_time"),
        ),
        objectives=Objectives(ttft_ms=objectives.get("slo_ttft"), tpot_ms=objectives.get("slo_tpot")),
        model=model,
        prompt_form=None if form is None else PromptForm(form),
        vocab_size=vocab_size,
        sampling={**{name: requests[name] for name in ("temperature", "ignore_eos") if name in requests}, **extra_body},
        timeout_s=timeout_s,
        num_warmup=num_warmup,
        seed=seed,
        source=source,
        scale_length=scale_length,
    )


def _flags(names: Any) -> str:
    return ", ".join(f"--{name.replace('_', '-')}" for name in names)
