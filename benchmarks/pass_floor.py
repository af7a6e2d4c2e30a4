"""What the memory of one H200 allows a TP8 rank of GLM-5.2 in a pass: bytes that must be read, at the copy rate.

Weights are read once, FP8 but for the router, `kv_b`, `eh_proj` and the head in bfloat16; of the experts those that
T tokens choose, each eight of 256 at random, and the shared one. A row reads 2,048 records of 656 bytes in every layer;
index keys, 132 bytes each, are read once for all rows of a request. No communication.
"""

from benchmarks.kernel_cases.rates import memory_us

_LAYERS, _DENSE_LAYERS, _FULL_LAYERS, _CHOSEN = 78, 3, 21, 2048
_ATTENTION = 12_582_912 + 3_538_944 + 4_194_304 + 3_670_016 + 12_582_912  # q_a, kv_a, q_b, kv_b in bfloat16, o
_INDEXER = 8_388_608 + 786_432 + 393_216  # wq_b, wk, weights_proj in bfloat16
_ROUTER, _EXPERT, _DENSE = 3_145_728, 3 * 6144 * 256, 3 * 6144 * 1536
_EH_PROJ, _HEAD = 6144 * 1536 * 2, 19_360 * 6144 * 2
_LATENT, _INDEX_KEY = 656, 132


def target_us(num_requests: int, rows_per_request: int, context: int) -> float:
    """Microseconds of a pass over all layers and the head."""
    num_rows = num_requests * rows_per_request
    sparse = _ROUTER + _experts(num_rows)
    weights = _LAYERS * _ATTENTION + _FULL_LAYERS * _INDEXER + _DENSE_LAYERS * _DENSE + _HEAD
    keys = _LAYERS * _latents(num_rows, context) + _FULL_LAYERS * num_requests * context * _INDEX_KEY
    return memory_us(weights + (_LAYERS - _DENSE_LAYERS) * sparse + keys)


def chain_us(num_requests: int, num_draft_tokens: int, context: int) -> float:
    """Microseconds of a refresh of K + 1 rows a request and of K - 1 draft passes behind it, each with the head."""
    if not num_draft_tokens:
        return 0.0
    refresh = _INDEXER + num_requests * context * _INDEX_KEY
    return memory_us(
        refresh
        + _mtp(num_requests * (num_draft_tokens + 1), context)
        + (num_draft_tokens - 1) * _mtp(num_requests, context)
    )


def _mtp(num_rows: int, context: int) -> float:
    return _ATTENTION + _ROUTER + _experts(num_rows) + _EH_PROJ + _HEAD + _latents(num_rows, context)


def _latents(num_rows: int, context: int) -> float:
    return num_rows * min(_CHOSEN, context) * _LATENT


def _experts(num_tokens: int) -> float:
    """Bytes of the experts that so many tokens are expected to choose, and of the shared one."""
    return (256 * (1 - (1 - 8 / 256) ** num_tokens) + 1) * _EXPERT
