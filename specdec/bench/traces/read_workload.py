"""Read a workload file of any known format; the fields of its first line tell which."""

from itertools import chain
from pathlib import Path

from specdec.bench.length_scale import LengthScale
from specdec.bench.traces.agent_sessions import read_agent_sessions
from specdec.bench.traces.mooncake import read_mooncake
from specdec.bench.traces.questions import read_questions
from specdec.bench.traces.trace_lines import read_lines
from specdec.bench.traces.tracelab import read_tracelab
from specdec.bench.workload import Workload
from specdec.errors import ConfigError, RequestError


def read_workload(path: Path, *, scale: LengthScale, num_output_tokens: int | None) -> Workload:
    """Read a file.

    Args:
        path: JSON lines.
        scale: Divides the lengths of a trace.
        num_output_tokens: Tokens to ask for in answer to a question, 256 if None; a trace has its own.

    Raises:
        ConfigError: The file cannot be read, or a setting does not go with its format.
        RequestError: The format is not known, or a line is not as it says.
    """
    lines = read_lines(path)
    first = next(lines, None)
    if first is None:
        raise RequestError(f"{path} holds no line: it must be JSON lines, one request or session each")
    keys = first.keys()
    every = chain([first], lines)
    if "turns" in keys:
        if scale.divisor != 1:
            raise ConfigError(f"--scale-length divides the lengths of a trace; {path} holds questions: leave it out")
        return read_questions(every, num_output_tokens=num_output_tokens or 256)
    if num_output_tokens is not None:
        raise ConfigError(f"--output-tokens is for questions and synthetic prompts; {path} has its own output lengths")
    if "round_idx" in keys:
        return read_tracelab(every, scale)
    if "requests" in keys:
        return read_agent_sessions(every, scale)
    if "input_length" in keys:
        return read_mooncake(every, scale)
    raise RequestError(
        f"{first.origin}: no known format has the fields {', '.join(sorted(keys)) or '(none)'}; known are lines with "
        "timestamp and input_length (Mooncake), requests (agent sessions), round_idx (TraceLab) and turns (questions)"
    )
