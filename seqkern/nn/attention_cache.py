"""Caches of keys and values for decoding: a block for each sequence, or pages that sequences share until one writes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.types import Device


@dataclass
class AttentionCache:
    """Keys and values of the tokens so far, for decoding: `MultiheadAttention.make_cache` makes one.

    Attributes:
        keys: (N, heads of keys, longest, head dimension); with pages (pages, heads of keys, page_size, head dimension).
        values: likewise.
        lengths: (N,), int64: the tokens of each sequence that are in it. `forward` moves them on.
        pages: the `AttentionPages` that tells whose pages are whose, or None.
    """

    keys: Tensor
    values: Tensor
    lengths: Tensor
    pages: AttentionPages | None = None

    def reorder(self, rows: Tensor) -> None:
        """Makes these sequences, int64 (M,), of those that are there, the sequences: any number, in any order.

        Without pages what changes place is copied, in place where as many sequences stay. Caches with the same pages
        must all be reordered, by the same rows.
        """
        before, self.lengths = self.lengths, self.lengths.index_select(0, rows)
        if self.pages is not None:
            if self.pages.caches[0] is self:  # once for all of them
                self.pages.reorder(rows)
        elif len(rows) != len(before) or rows.device.type != "cpu" or not len(rows):
            self.keys, self.values = (t.index_select(0, rows) for t in (self.keys, self.values))
        else:
            moved = (rows != torch.arange(len(rows))).nonzero()[:, 0]
            longest = int(before.max())
            for t in (self.keys, self.values):
                used = t[:, :, :longest]
                used.index_copy_(0, moved, used.index_select(0, rows[moved]))


class AttentionPages:
    """Which pages of the caches of a model's layers hold which sequence's tokens; copied on write.

    Beams and other sequences with a common beginning share its pages, so that reordering copies numbers of pages. A
    sequence that writes into a page which others hold gets a copy of it first. More pages are made as they are needed.

    Args:
        batch: sequences. longest: tokens of one at most. page_size: tokens of a page.
        device: where the table is, as the caches.

    Attributes:
        table: (batch, pages of a sequence), int64: token j of sequence b lies in page table[b, j // page_size]; -1:
            none yet.

    On a GPU each call of a layer reads the lengths back.

    Raises:
        ValueError: sizes below 1, or more tokens than `longest`.

    Example:
        >>> import torch, seqkern
        >>> layer = seqkern.nn.MultiheadAttention(8, 2, batch_first=True).eval()
        >>> pages = seqkern.nn.AttentionPages(1, 64, page_size=4)
        >>> cache = layer.make_cache(1, 64, pages=pages)
        >>> with torch.no_grad():
        ...     for beams in (1, 3):
        ...         x = torch.randn(beams, 5, 8)
        ...         y, _ = layer(x, x, x, need_weights=False, cache=cache)
        ...         cache.reorder(torch.tensor([0, 0, 0]))  # three beams
        >>> cache.lengths.tolist(), pages.used
        ([10, 10, 10], 3)
    """

    def __init__(self, batch: int, longest: int, page_size: int = 16, device: Device = None):
        for name, value in (("batch", batch), ("longest", longest), ("page_size", page_size)):
            if value < (name != "batch"):
                raise ValueError(f"AttentionPages: {name} must be at least {int(name != 'batch')}, got {value}")
        self.page_size, self.longest = page_size, longest
        self.table = torch.full((batch, -(-longest // page_size)), -1, dtype=torch.int64, device=device)
        self.holders = torch.zeros(0, dtype=torch.int64)  # sequences that hold each page
        self.caches: list[AttentionCache] = []

    @property
    def used(self) -> int:
        """Pages that hold something."""
        return int((self.holders > 0).sum())

    def join(self, cache: AttentionCache) -> None:
        """Gives a layer's cache its pages."""
        self.caches.append(cache)
        cache.pages = self
        _add_pages(cache, len(self.holders) - cache.keys.shape[0])

    def reorder(self, rows: Tensor) -> None:
        """Sequences share what they come from; pages that no sequence holds are free."""
        self.table = self.table.index_select(0, rows)
        held = self.table[self.table >= 0].cpu()
        self.holders = torch.bincount(held, minlength=len(self.holders))

    def prepare(self, lengths: Tensor, count: int) -> None:
        """Gives each sequence pages of its own for tokens lengths to lengths + count - 1."""
        if count == 0 or not len(lengths):
            return
        starts = lengths.cpu()
        if int(starts.max()) + count > self.longest:
            raise ValueError(
                f"AttentionPages: {count} tokens after {int(starts.max())} must fit longest, {self.longest}"
            )
        first, last = starts // self.page_size, (starts + count - 1) // self.page_size
        column = torch.arange(self.table.shape[1])
        written = (column >= first[:, None]) & (column <= last[:, None])
        row, column = written.nonzero(as_tuple=True)
        page = self.table[row.to(self.table.device), column.to(self.table.device)].cpu()
        alone = torch.zeros_like(written[row, column]) if not len(self.holders) else self.holders[page] == 1
        alone &= page >= 0
        if alone.all():
            return
        row, column, page = (t[~alone] for t in (row, column, page))
        # The last sequence that holds a page keeps it.
        held = torch.bincount(page[page >= 0], minlength=len(self.holders))
        keeps = torch.zeros(len(page), dtype=torch.bool)
        for each in (held == self.holders).logical_and(held > 0).nonzero()[:, 0].tolist():
            keeps[int((page == each).nonzero()[-1])] = True
        row, column, page = (t[~keeps] for t in (row, column, page))
        new = self._take(len(page))
        copied = page >= 0
        self.holders -= torch.bincount(page[copied], minlength=len(self.holders))
        self.holders[new] = 1
        for cache in self.caches:
            for t in (cache.keys, cache.values):
                t[new[copied].to(t.device)] = t[page[copied].to(t.device)]
        self.table[row.to(self.table.device), column.to(self.table.device)] = new.to(self.table.device)

    def _take(self, count: int) -> Tensor:
        free = (self.holders == 0).nonzero()[:, 0]
        if len(free) < count:
            more = max(count - len(free), len(self.holders))
            self.holders = torch.cat((self.holders, self.holders.new_zeros(more)))
            for cache in self.caches:
                _add_pages(cache, more)
            free = (self.holders == 0).nonzero()[:, 0]
        return free[:count]


def _add_pages(cache: AttentionCache, count: int) -> None:
    for name in ("keys", "values"):
        t = getattr(cache, name)
        setattr(cache, name, torch.cat((t, t.new_zeros((count, *t.shape[1:])))))
