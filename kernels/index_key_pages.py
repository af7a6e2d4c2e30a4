"""Pages of FP8 index keys as the copy engine of a Hopper GPU loads them.

A page holds 64 keys of 128 bytes, behind them their 64 float32 scales (`index_key_format`): 8448 bytes. The engine
writes the keys into shared memory in the order in which the matrix instructions read them; for that it wants to know,
once, how pages lie in memory.

P = pages, X = bytes of a page.
"""

import ctypes
from dataclasses import dataclass

import torch

from specdec.kernels.errors import ConfigError

PAGE_SIZE = 64
INDEX_DIM = 128
PAGE_BYTES = PAGE_SIZE * (INDEX_DIM + 4)
_ALIGNMENT = 16  # bytes, of pages in memory


@dataclass(frozen=True, slots=True)
class IndexKeyPages:
    """Pages of index keys of one layer, and the description of them that kernels take.

    Attributes:
        pages_PX: u8 [P, X]; from page to page there may be other bytes, such as the pages of other layers.
        tensor_map: Of the keys, opaque, u8 [128] on the device.
    """

    pages_PX: torch.Tensor
    tensor_map: torch.Tensor

    @classmethod
    def of(cls, pages_PX: torch.Tensor) -> "IndexKeyPages":
        """Describe pages. Once for each layer of a pool: it waits for a copy to the device.

        Raises:
            ConfigError: These are not pages, or do not begin at multiples of 16 bytes.
        """
        check_pages(pages_PX)
        from cuda.bindings import driver  # noqa: PLC0415

        status, tensor_map = driver.cuTensorMapEncodeTiled(
            driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8,
            3,
            pages_PX.data_ptr(),
            [driver.cuuint64_t(size) for size in (INDEX_DIM, PAGE_SIZE, len(pages_PX))],
            [driver.cuuint64_t(step) for step in (INDEX_DIM, pages_PX.stride(0))],
            [driver.cuuint32_t(size) for size in (INDEX_DIM, PAGE_SIZE, 1)],
            [driver.cuuint32_t(1)] * 3,
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
        if int(status):
            raise ConfigError(f"the driver refuses pages at {pages_PX.data_ptr():#x}: {status.name}")
        opaque = bytearray(ctypes.string_at(tensor_map.getPtr(), 128))
        return cls(pages_PX, torch.frombuffer(opaque, dtype=torch.uint8).to(pages_PX.device))


def check_pages(pages_PX: torch.Tensor) -> None:
    """Raise ConfigError unless pages lie as the copy engine takes them."""
    if pages_PX.dtype != torch.uint8 or pages_PX.shape[1:] != (PAGE_BYTES,) or pages_PX.stride(1) != 1:
        raise ConfigError(f"pages must be uint8 [P, {PAGE_BYTES}], got {pages_PX.dtype} {tuple(pages_PX.shape)}")
    if pages_PX.stride(0) % _ALIGNMENT or pages_PX.data_ptr() % _ALIGNMENT:
        raise ConfigError(
            f"pages must begin at multiples of {_ALIGNMENT} bytes, got {pages_PX.data_ptr():#x} and "
            f"{pages_PX.stride(0)} from page to page"
        )
