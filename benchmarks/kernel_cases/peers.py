"""Kernels of others, to compare with, each checked before it is timed.

FlashMLA, DeepGEMM and the Triton mixture come from the folder `vllm` of a vLLM wheel, of which `bench_kernels.py
--peers` says where it lies; FlashInfer must be installed, with CUDA's headers, as it compiles its kernels.
"""

import ast
import functools
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.gpu_timing import relative_error
from specdec.kernels.latent_rows import LATENT_DIM, ROPE_DIM, LatentFormat

_MOST_ERROR = 0.02  # of bfloat16 and of FP8 products, with room
_FLASHINFER_WORKSPACE_BYTES = 128 << 20
_PLANS = 20


def is_right(name: str, out: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether a peer computes what ours does; says so where it does not, and it is then left out."""
    error = relative_error(out, expected)
    if not error < _MOST_ERROR:
        print(f"{name} is left out: its relative error is {error:.1e}, at most {_MOST_ERROR} is right", file=sys.stderr)
    return error < _MOST_ERROR


def deep_gemm() -> Any:
    """DeepGEMM, or None where there is none."""
    try:
        from vllm.third_party import deep_gemm  # type: ignore[import-not-found]  # noqa: PLC0415
    except (ImportError, AssertionError):
        return None
    return deep_gemm


def flash_mla() -> Any:
    """FlashMLA, or None where there is none."""
    try:
        from vllm.third_party.flashmla import flash_mla_interface  # type: ignore[import-not-found]  # noqa: PLC0415
    except (ImportError, AssertionError):
        return None
    return flash_mla_interface


class TritonMoe(NamedTuple):
    """The product of vLLM with chosen experts, in Triton.

    Attributes:
        kernel: The Triton kernel.
        sizes: Its tuned block sizes, by the number of tokens.
    """

    kernel: Any
    sizes: dict[int, dict[str, int]]

    def sizes_for(self, num_tokens: int) -> dict[str, int]:
        """Those of the nearest number of tokens, as vLLM takes them."""
        return self.sizes[min(self.sizes, key=lambda tuned: abs(tuned - num_tokens))]


def triton_moe(num_experts: int, width: int) -> TritonMoe | None:
    """Give the product with the sizes tuned on an H200 for experts of FP8 blocks; None where there is none.

    To import its module takes most of vLLM: the two functions that the kernel consists of are read from it.
    """
    spec = importlib.util.find_spec("vllm")
    for folder in spec.submodule_search_locations or () if spec else ():
        path = Path(folder) / "model_executor/layers/fused_moe/fused_moe.py"
        tuned = f"E={num_experts},N={width},device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json"
        if path.exists() and (path.parent / "configs" / tuned).exists():
            sizes = json.loads((path.parent / "configs" / tuned).read_text())
            sizes = {int(num): each for num, each in sizes.items() if num.isdigit()}
            return TritonMoe(_functions_of(path, "write_zeros_to_output", "fused_moe_kernel"), sizes)
    return None


def _functions_of(path: Path, *names: str) -> Any:
    """Give the last of some Triton functions of a file, in a module of their own."""
    text = path.read_text()
    functions = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name in names]
    source = "import triton\nimport triton.language as tl\n"
    for function in functions:
        first = min(function.lineno, *(each.lineno for each in function.decorator_list))
        source += "\n\n" + "\n".join(text.splitlines()[first - 1 : function.end_lineno]) + "\n"
    copy = Path(tempfile.mkdtemp()) / path.name  # Triton reads the text of a function from its file
    copy.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, copy)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, names[-1])


def flashinfer() -> Any:
    """FlashInfer, or None where there is none."""
    try:
        import flashinfer  # type: ignore[import-not-found]  # noqa: PLC0415
    except ImportError:
        return None
    return flashinfer


class FlashInferMla:
    """FlashInfer's latent attention over pages of rows: a plan on the host, then calls.

    A call is what stands in a CUDA graph. The plan reads the lengths on the host and deals out the work for exactly
    these; a call reads only what the plan left, so lengths that only the device knows cannot be given.

    Args:
        query_TAX: Latent part, then rope part, bfloat16; equally many for each request.
        row_PSX: Pages of rows, latent part, then rope part; bfloat16 or e4m3.
        page_BP: Pages of each request, i32; of one row each, they are listed rows.
        length_B: Rows of each request, i32, of which a query sees one less than the next.
        scale: Factor on the scores.
        row_scale: Factor on e4m3 rows.
    """

    def __init__(
        self,
        query_TAX: torch.Tensor,
        row_PSX: torch.Tensor,
        page_BP: torch.Tensor,
        length_B: torch.Tensor,
        *,
        scale: float,
        row_scale: float,
    ) -> None:
        from flashinfer.mla import BatchMLAPagedAttentionWrapper  # type: ignore[import-not-found]  # noqa: PLC0415

        (num_requests, num_pages), num_heads = page_BP.shape, query_TAX.shape[1]
        rows_per_request = len(query_TAX) // num_requests
        each_B1 = torch.arange(num_requests + 1, dtype=torch.int32, device=query_TAX.device)
        wrapper = BatchMLAPagedAttentionWrapper(_flashinfer_workspace(query_TAX.device), backend="fa3")
        self.plan = functools.partial(
            wrapper.plan,
            each_B1 * rows_per_request,
            each_B1 * num_pages,
            page_BP.flatten(),
            length_B,
            num_heads,
            LATENT_DIM,
            ROPE_DIM,
            row_PSX.shape[1],
            rows_per_request > 1,
            scale,
            query_TAX.dtype,
            row_PSX.dtype,
        )
        scales = {"ckv_scale": row_scale, "kpe_scale": row_scale} if row_PSX.dtype is torch.float8_e4m3fn else {}
        self._run = functools.partial(
            wrapper.run,
            *(part.contiguous() for part in query_TAX.split((LATENT_DIM, ROPE_DIM), dim=-1)),
            *row_PSX.split((LATENT_DIM, ROPE_DIM), dim=-1),
            return_lse=True,
            return_lse_base_on_e=True,
            **scales,
        )
        self.plan()

    def __call__(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend: outputs and logarithms of sums, to base e."""
        out_TAL, lse_TA = self._run()
        return out_TAL, lse_TA

    def planned_us(self) -> float:
        """Microseconds of a plan and a call by the host's clock, until the device has ended: a median."""
        times = []
        for _ in range(_PLANS):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            self.plan()
            self()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
        return statistics.median(times) * 1e6


def flashinfer_mla(
    query_TAX: torch.Tensor,
    pool_PB: torch.Tensor,
    page_BP: torch.Tensor,
    length_B: torch.Tensor,
    expected_TAL: torch.Tensor,
    *,
    row_format: LatentFormat,
    page_rows: int,
    scale: float,
    row_scale: float,
) -> FlashInferMla | None:
    """Give FlashInfer's latent attention, right in the rows that are expected; None where there is none, or it refuses.

    Args:
        query_TAX: As for `FlashInferMla`, like what is not told here.
        pool_PB: Pages of rows, u8.
        page_BP: Pages of each request.
        length_B: Rows of each request.
        expected_TAL: Outputs of the first rows.
        row_format: Of the rows; it does not read packed ones.
        page_rows: Rows of a page; 1 where rows are listed.
        scale: Factor on the scores.
        row_scale: Factor on e4m3 rows.
    """
    if flashinfer() is None or row_format is LatentFormat.FP8_PACKED:
        return None
    dtype = torch.bfloat16 if row_format is LatentFormat.BFLOAT16 else torch.float8_e4m3fn
    row_PSX = pool_PB.view(dtype).view(-1, page_rows, LATENT_DIM + ROPE_DIM)
    name = f"FlashInfer, {dtype} rows, {query_TAX.shape[1]} heads"
    try:
        peer = FlashInferMla(query_TAX, row_PSX, page_BP, length_B, scale=scale, row_scale=row_scale)
        out_TAL, _ = peer()
    except Exception as error:  # what it takes differs from release to release
        print(f"{name}: does not run: {error}", file=sys.stderr)
        return None
    return peer if is_right(name, out_TAL[: len(expected_TAL)], expected_TAL) else None


@functools.cache
def _flashinfer_workspace(device: torch.device) -> torch.Tensor:
    """Memory for partial results, which one call after the other may use."""
    return torch.empty(_FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def flashinfer_top_k(score_TS: torch.Tensor, entry_TS: torch.Tensor, k: int) -> Callable[[], torch.Tensor] | None:
    """Give FlashInfer's choice of the k best of each row, the right ones; None where there is none, or it refuses.

    Args:
        score_TS: Scores, float32.
        entry_TS: What is given for a score, i32; one row for all, or one each.
        k: How many are chosen, in no order.
    """
    module = flashinfer()
    if module is None:
        return None
    num_rows, length = score_TS.shape
    length_T = torch.full((num_rows,), length, dtype=torch.int32, device=score_TS.device)
    row_T = torch.zeros_like(length_T)
    place_1S = torch.arange(length, dtype=torch.int32, device=score_TS.device)[None]
    choose = functools.partial(module.top_k_page_table_transform, score_TS)
    try:
        place_TK = choose(place_1S, length_T, k, row_T).long()
    except Exception as error:  # as above, and its kernels are compiled here
        print(f"FlashInfer's top-k: does not run: {error}", file=sys.stderr)
        return None
    best_TK, expected_TK = score_TS.gather(1, place_TK), torch.topk(score_TS, k, dim=1).values
    if not torch.equal(best_TK.sort(dim=1, descending=True).values, expected_TK):
        print("FlashInfer's top-k is left out: its best scores are others than torch's", file=sys.stderr)
        return None
    return functools.partial(choose, entry_TS, length_T, k, row_T if len(entry_TS) == 1 else None)


class FlashInferChain(NamedTuple):
    """FlashInfer's rejection sampling.

    Attributes:
        from_probs: From the target's probabilities, which are given.
        from_logits: From its logits: a softmax, then the above.
    """

    from_probs: Callable[[], object]
    from_logits: Callable[[], object]


def flashinfer_chain(
    logits_BK1V: torch.Tensor, draft_ids_BK: torch.Tensor, draft_probs_BKV: torch.Tensor
) -> FlashInferChain | None:
    """Give FlashInfer's rejection sampling, whose tokens are possible; None where there is none, or it refuses.

    Args:
        logits_BK1V: The target's, float32.
        draft_ids_BK: K drafts of each request, i64.
        draft_probs_BKV: What they were drawn from, float32.
    """
    module = flashinfer()
    if module is None:
        return None
    num_requests, num_drafts = draft_ids_BK.shape
    device = draft_ids_BK.device
    draft_ids = draft_ids_BK.int()
    target_probs = logits_BK1V.softmax(dim=-1)
    kept_B, emitted_B = torch.zeros(2, num_requests, dtype=torch.int32, device=device)
    seed = torch.tensor([7], device=device)  # on the device, for the graph

    def from_probs(probs: torch.Tensor = target_probs) -> torch.Tensor:
        chain = module.sampling.chain_speculative_sampling
        ids_BK1: torch.Tensor = chain(draft_probs_BKV, draft_ids, probs, kept_B, emitted_B, seed=seed, offset=seed)[0]
        return ids_BK1

    def from_logits() -> torch.Tensor:
        return from_probs(module.sampling.softmax(logits_BK1V.flatten(0, 1)).view_as(logits_BK1V))

    try:
        results = []
        for call in (from_probs, from_logits):
            emitted_B.zero_()
            results.append((call(), emitted_B.clone()))
    except Exception as error:  # as above
        print(f"FlashInfer's rejection sampling: does not run: {error}", file=sys.stderr)
        return None
    for ids_BK1, num_B in results:
        for ids, drafts, num, target_KV, draft_KV in zip(
            ids_BK1.tolist(), draft_ids.tolist(), num_B.tolist(), target_probs, draft_probs_BKV, strict=True
        ):
            last = ids[num]
            is_beyond = target_KV[num, last] > (draft_KV[num, last] if num < num_drafts else 0)
            if ids[:num] != drafts[:num] or not is_beyond or any(i != -1 for i in ids[num + 1 :]):
                print("FlashInfer's rejection sampling is left out: its tokens are not possible", file=sys.stderr)
                return None
    return FlashInferChain(from_probs, from_logits)
