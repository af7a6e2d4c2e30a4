"""Which rank of an engine holds which KV: the engine's placements, as one side of a transfer.

target, tensor parallel    pages spread over the dcp ranks by their ids, each of the tp / dcp groups the same
draft, tensor parallel     every rank all of it
layer split                every rank all pages of its own layers; the draft's on the last rank
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from specdec.dcp.geometry import PoolRole
from specdec.dcp.held_layers import layers_of_ranks
from specdec.dcp.layout import EntryLayout, PoolLayout
from specdec.dcp.page_ids import num_page_ids
from specdec.transfer.placement import Placement, by_rank, dcp, entry_name, replicated


@dataclass(frozen=True, kw_only=True)
class KvSide:
    """The ranks of one engine.

    Attributes:
        target: Layout of the target pool.
        draft: Layout of the draft pool; None without one.
        num_pages: Physical target pages of a rank.
        tp_size: Tensor-parallel ranks.
        dcp_size: Ranks of these that share the target pages.
        cp_size: Ranks of a layer split; 1 where there is none.
    """

    target: PoolLayout
    draft: PoolLayout | None
    num_pages: int
    tp_size: int
    dcp_size: int
    cp_size: int = 1

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is derived: a side travels with every order."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @property
    def num_ranks(self) -> int:
        """All ranks."""
        return self.tp_size * self.cp_size

    @cached_property
    def entries(self) -> Mapping[str, EntryLayout]:
        """Layouts by name of the kind of entry."""
        layouts = (self.target,) if self.draft is None else (self.target, self.draft)
        return {entry_name(each.role, entry.kind): entry for each in layouts for entry in each.entries}

    @cached_property
    def placements(self) -> Mapping[str, Placement]:
        """Where each kind of entry lies."""
        found = {}
        for layout in (self.target, self.draft):
            if layout is None:
                continue
            for entry in layout.entries:
                found[entry_name(layout.role, entry.kind)] = self._placement(layout, entry)
        return found

    def _placement(self, layout: PoolLayout, entry: EntryLayout) -> Placement:
        is_draft = layout.role is PoolRole.DRAFT
        if self.cp_size > 1:
            held = [[layer for layer in entry.layers if layer in run] for run in layers_of_ranks(layout, self.cp_size)]
            return by_rank(held, page_size=layout.page_size, num_pages=self.num_pages)
        if is_draft:
            num_pages = num_page_ids(self.num_pages, self.dcp_size)
            return replicated(entry.layers, num_ranks=self.tp_size, page_size=layout.page_size, num_pages=num_pages)
        return dcp(
            entry.layers,
            dcp_size=self.dcp_size,
            tp_size=self.tp_size,
            page_size=layout.page_size,
            num_pages=self.num_pages,
        )
