"""Bytes that a rank sends around attention, for each token and layer: counted in the collectives, and by formula.

Runs one decode round of glm-tiny over processes of this host: `python benchmarks/dcp_exchange.py [--tp-size 2 ...]`.
"""

import argparse
from collections import Counter

from specdec import Engine, SamplingParams
from specdec.dcp.exchange import ExchangeStrategy, exchange_bytes, query_bytes

_FLOAT32_BYTES = 4
_PROMPT = [5, 6, 7, 8]


def measure(strategy: ExchangeStrategy, *, tp_size: int, dcp_size: int) -> tuple[Counter[str], int, Engine]:
    """Count the bytes of rank 0 by kind of dcp collective over a greedy run of one request, and its rows."""
    with Engine.from_pretrained(
        "glm-tiny", num_draft_tokens=0, tp_size=tp_size, dcp_size=dcp_size, exchange=strategy
    ) as engine:
        engine.record_collectives(True)
        result = engine.generate([_PROMPT], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))[0]
        recorded = engine.record_collectives(False)[0]
    counted = Counter[str]()
    for collective in recorded:
        if collective.group == "dcp":
            counted[collective.kind] += collective.num_bytes
    num_rows = len(_PROMPT) + len(result.token_ids) - 1  # the last token is never computed
    return counted, num_rows, engine


def main() -> None:
    """Print a table of both strategies."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tp-size", type=int, default=2)
    parser.add_argument("--dcp-size", type=int, default=2)
    arguments = parser.parse_args()
    print(f"tp {arguments.tp_size} dcp {arguments.dcp_size}: bytes a rank sends, per row and layer")
    print(f"{'exchange':16} {'counted':>10} {'formula':>10}")
    for strategy in ExchangeStrategy:
        counted, num_rows, engine = measure(strategy, tp_size=arguments.tp_size, dcp_size=arguments.dcp_size)
        config = engine.checkpoint.config
        num_heads = config.num_heads // arguments.tp_size
        expected = query_bytes(
            dcp_size=arguments.dcp_size,
            num_heads=num_heads,
            query_dim=config.kv_lora_rank + config.qk_rope_head_dim,
            value_bytes=_FLOAT32_BYTES,
        ) + exchange_bytes(strategy, dcp_size=arguments.dcp_size, num_heads=num_heads, latent_dim=config.kv_lora_rank)
        print(f"{strategy:16} {sum(counted.values()) / num_rows / config.num_layers:10.0f} {expected:10.0f}")


if __name__ == "__main__":
    main()
