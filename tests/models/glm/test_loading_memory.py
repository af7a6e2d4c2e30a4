"""Loading needs anonymous memory for the parameters and little staging: no shard is ever copied."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from specdec.models.glm.config import GlmConfig
from specdec.models.glm.manifest import TensorSpec, derive_manifest
from tests.support.tiny_checkpoint import Weights, tiny_config, tiny_spec

NUM_SHARDS = 4
DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3"}

LOAD_AND_MEASURE = """
import json, sys, threading, time
import torch
from specdec.models.glm.checkpoint import load_checkpoint

def anonymous_bytes():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

torch.set_num_threads(1)
torch.ones(8).bfloat16().float().mul_(2.0)
peak = before = anonymous_bytes()
done = threading.Event()

def sample():
    global peak
    while not done.is_set():
        peak = max(peak, anonymous_bytes())
        time.sleep(0.001)

sampler = threading.Thread(target=sample)
sampler.start()
loaded = load_checkpoint(sys.argv[1], dtype=torch.bfloat16, num_threads=2)
done.set()
sampler.join()
held = sum(parameter.nbytes for parameter in loaded.parameters.values())
print(json.dumps({"grown": max(peak, anonymous_bytes()) - before, "held": held}))
"""


def write_sparse_shard(path: Path, tensors: list[TensorSpec]) -> None:
    """A safetensors file whose data is one hole: all zeros, without taking any disk."""
    header, end = {}, 0
    for tensor in tensors:
        offsets = [end, end + tensor.size_bytes]
        header[tensor.name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": offsets}
        end += tensor.size_bytes
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        file.truncate(file.tell() + end)


@pytest.mark.skipif(sys.platform != "linux", reason="RssAnon is in /proc of Linux")
@pytest.mark.parametrize("weights", ["bfloat16", "fp8"])
def test_loading_takes_little_more_anonymous_memory_than_the_parameters(tmp_path: Path, weights: Weights) -> None:
    spec = tiny_spec("share", weights=weights, hidden_size=1024, moe_intermediate_size=512, num_experts=16)
    values = tiny_config(spec)
    (tmp_path / "config.json").write_text(json.dumps(values))
    tensors = list(derive_manifest(GlmConfig.from_dict(values)).tensors.values())
    weight_map: dict[str, str] = {}
    for shard in range(NUM_SHARDS):
        name = f"model-{shard + 1:05d}-of-{NUM_SHARDS:05d}.safetensors"
        write_sparse_shard(tmp_path / name, tensors[shard::NUM_SHARDS])
        weight_map |= {tensor.name: name for tensor in tensors[shard::NUM_SHARDS]}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    output = subprocess.run(
        [sys.executable, "-c", LOAD_AND_MEASURE, str(tmp_path)],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    measured = json.loads(output)
    shard_bytes = max(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert measured["held"] > 200e6
    assert measured["grown"] < measured["held"] + min(shard_bytes, 25e6)
    assert measured["grown"] > 0.9 * measured["held"]  # the probe sees it; pages freed before may serve again
