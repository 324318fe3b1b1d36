"""Caches of attention in pages: the same outputs as blocks, pages shared until one writes, errors."""

from __future__ import annotations

import pytest
import torch

import seqkern


def layer():
    torch.manual_seed(0)
    return seqkern.nn.MultiheadAttention(16, 4, batch_first=True, num_kv_heads=2).eval()


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def contents(cache, row):
    """Keys and values of a sequence's tokens, from its block or its pages."""
    n = int(cache.lengths[row])
    if cache.pages is None:
        return [t[row, :, :n].clone() for t in (cache.keys, cache.values)]
    size, table = cache.pages.page_size, cache.pages.table[row]
    places = [(int(table[i // size]), i % size) for i in range(n)]
    return [torch.stack([t[page, :, at] for page, at in places], 1) for t in (cache.keys, cache.values)]


@pytest.mark.parametrize("page_size", [1, 3, 4, 64])
@torch.no_grad()
def test_pages_hold_what_blocks_hold(page_size):
    """Two layers, prompts of different lengths, then beams that come, go and change places."""
    layers, lengths = [layer(), layer()], torch.tensor([5, 2, 1])
    pages = seqkern.nn.AttentionPages(3, 40, page_size=page_size)
    blocks = [each.make_cache(3, 40) for each in layers]
    paged = [each.make_cache(3, 40, pages=pages) for each in layers]
    orders = [[0, 0, 1, 1, 2, 2], [0, 1, 2, 2, 5, 4], [3, 3, 3, 0, 1, 5], [5, 4, 3, 2, 1, 0], [2, 2], [0, 1, 1, 1, 0]]
    for step, order in enumerate([None, *orders]):
        if order is not None:
            for cache in (*blocks, *paged):
                cache.reorder(torch.tensor(order))
        x = draw(len(blocks[0].lengths), 5 if order is None else 1 + step % 2, 16, seed=step)
        for one, block, cache in zip(layers, blocks, paged, strict=True):
            expected, _ = one(x, x, x, need_weights=False, cache=block)
            ours, _ = one(x, x, x, need_weights=False, cache=cache)
            torch.testing.assert_close(ours, expected)
            if order is None:
                block.lengths, cache.lengths = lengths.clone(), lengths.clone()
            assert torch.equal(cache.lengths, block.lengths)
            for row in range(len(x)):
                assert all(torch.equal(a, b) for a, b in zip(contents(cache, row), contents(block, row), strict=True))
        used = pages.table[pages.table >= 0]
        assert torch.equal(pages.holders, torch.bincount(used, minlength=len(pages.holders)))
        ends = paged[0].lengths - 1
        written = pages.table[torch.arange(len(x)), ends // page_size]
        assert written.unique().numel() == len(x), "a page that was written belongs to two sequences"


@torch.no_grad()
def test_a_common_beginning_is_held_once():
    one, pages = layer(), seqkern.nn.AttentionPages(1, 100, page_size=8)
    cache = one.make_cache(1, 100, pages=pages)
    x = draw(1, 64, 16)
    one(x, x, x, need_weights=False, cache=cache)
    assert pages.used == 8
    cache.reorder(torch.zeros(10, dtype=torch.int64))
    assert pages.used == 8
    assert cache.keys.shape[0] == 8
    x = draw(10, 1, 16)
    one(x, x, x, need_weights=False, cache=cache)
    assert pages.used == 18  # one page more for each
    cache.reorder(torch.tensor([3]))
    assert pages.used == 9  # the others' are free, and used again
    cache.reorder(torch.zeros(5, dtype=torch.int64))
    before = cache.keys.shape[0]
    x = draw(5, 1, 16)
    one(x, x, x, need_weights=False, cache=cache)
    assert pages.used == 13  # four copies of the page that was shared; the fifth sequence keeps it
    assert cache.keys.shape[0] == before


@torch.no_grad()
def test_no_sequences():
    pages = seqkern.nn.AttentionPages(0, 8)
    cache = layer().make_cache(0, 8, pages=pages)
    x = torch.zeros(0, 3, 16)
    assert layer()(x, x, x, need_weights=False, cache=cache)[0].shape == (0, 3, 16)


def test_errors():
    for given, message in (
        ((-1, 4), "batch must be at least 0, got -1"),
        ((1, 0), "longest must be at least 1, got 0"),
        ((1, 4, 0), "page_size must be at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=f"AttentionPages: {message}"):
            seqkern.nn.AttentionPages(*given)
    pages = seqkern.nn.AttentionPages(2, 8)
    for given in ((3, 8), (2, 9)):
        with pytest.raises(ValueError, match="pages must be for . sequences of . tokens, got 2 of 8"):
            layer().make_cache(*given, pages=pages)
    cache, x = layer().make_cache(2, 8, pages=pages), draw(2, 9, 16)
    with torch.no_grad(), pytest.raises(ValueError, match="9 tokens after 0 must fit longest, 8"):
        layer()(x, x, x, need_weights=False, cache=cache)
    assert pages.used == 0
