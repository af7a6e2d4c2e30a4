"""Rates of one H200 that floors are computed with, measured on one (`calibrate` measures them again)."""

COPY_BYTES_PER_US = 4.3e6  # device to device, bytes read and written
BF16_FLOPS_PER_US = 790e6
FP8_FLOPS_PER_US = 1400e6


def memory_us(num_bytes: float) -> float:
    """Microseconds in which so many bytes pass the memory."""
    return num_bytes / COPY_BYTES_PER_US
