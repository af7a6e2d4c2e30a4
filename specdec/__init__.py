"""Speculative decoding for GLM-5.x checkpoints.

The names below load on first use, so that the packages underneath (`specdec.transfer`, `specdec.kernels`, ...) can be
imported without the engine.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdec.engine import Engine, GenerationStream
    from specdec.engine_config import EngineConfig
    from specdec.errors import CheckpointError, ConfigError, OutOfPagesError, RequestError, RoundError, SpecdecError
    from specdec.grammar.grammar import Grammar
    from specdec.request import SpeculationStats
    from specdec.result import BatchError, Choice, GenerationResult, Score, StreamDelta, Usage
    from specdec.sampling.sampling_params import SamplingParams
    from specdec.sampling.token_logprobs import TokenLogprobs

_MODULE_OF_NAME = {
    "BatchError": "specdec.result",
    "CheckpointError": "specdec.errors",
    "Choice": "specdec.result",
    "ConfigError": "specdec.errors",
    "Engine": "specdec.engine",
    "EngineConfig": "specdec.engine_config",
    "GenerationResult": "specdec.result",
    "GenerationStream": "specdec.engine",
    "Grammar": "specdec.grammar.grammar",
    "OutOfPagesError": "specdec.errors",
    "RequestError": "specdec.errors",
    "RoundError": "specdec.errors",
    "SamplingParams": "specdec.sampling.sampling_params",
    "Score": "specdec.result",
    "SpecdecError": "specdec.errors",
    "SpeculationStats": "specdec.request",
    "StreamDelta": "specdec.result",
    "TokenLogprobs": "specdec.sampling.token_logprobs",
    "Usage": "specdec.result",
}

__all__ = [
    "BatchError",
    "CheckpointError",
    "Choice",
    "ConfigError",
    "Engine",
    "EngineConfig",
    "GenerationResult",
    "GenerationStream",
    "Grammar",
    "OutOfPagesError",
    "RequestError",
    "RoundError",
    "SamplingParams",
    "Score",
    "SpecdecError",
    "SpeculationStats",
    "StreamDelta",
    "TokenLogprobs",
    "Usage",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF_NAME:
        raise AttributeError(f"module 'specdec' has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF_NAME[name]), name)
