"""Records of tensors, cut to their first entries: a batch of fewer requests in the same memory."""

from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch

Record = TypeVar("Record")


def first_entries(record: Record, size: int) -> Record:
    """Give a record with views of the first `size` entries of each of its tensors, those of inner records too."""
    assert is_dataclass(record)
    assert not isinstance(record, type)
    cut: dict[str, Any] = {}
    for field in fields(record):
        value = getattr(record, field.name)
        cut[field.name] = value[:size] if isinstance(value, torch.Tensor) else first_entries(value, size)
    return replace(record, **cut)
