"""Dropout whose mask is a function of seed and position: Philox4x32 with 7 rounds, counted, not stored.

Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 7
_WORD = 0xFFFFFFFF


def dropout_words(counter: list[Tensor], key: list[Tensor], rounds: int = ROUNDS) -> list[Tensor]:
    """Four counter words and two key words (int64 tensors holding uint32) to four random words."""
    for _ in range(rounds):
        product0, product1 = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57  # modulo 2^64, which keeps every bit
        counter = [
            (product1 >> 32 & _WORD) ^ counter[1] ^ key[0],
            product1 & _WORD,
            (product0 >> 32 & _WORD) ^ counter[3] ^ key[1],
            product0 & _WORD,
        ]
        key = [(key[0] + 0x9E3779B9) & _WORD, (key[1] + 0xBB67AE85) & _WORD]
    return counter


def keep_mask(seed: Tensor, dropout_p: float, rows: int | Tensor, columns: int) -> Tensor:
    """Which elements of a (rows, columns) matrix are kept: word column % 4 of counter (column / 4, row) >= p 2^32.

    Instead of their number, the rows themselves.
    """
    seed = seed.reshape(())
    row = (torch.arange(rows, device=seed.device) if isinstance(rows, int) else rows)[:, None]
    block = torch.arange((columns + 3) // 4, device=seed.device)[None, :]
    counter = [block.expand(len(row), -1), (row & _WORD).expand(-1, block.shape[1]), row >> 32, torch.zeros_like(row)]
    words = torch.stack(dropout_words(counter, [seed & _WORD, seed >> 32 & _WORD]), -1)
    return words.flatten(1)[:, :columns] >= min(int(dropout_p * 2**32), 2**32 - 1)


def dropout(input: Tensor, seed: Tensor, dropout_p: float) -> Tensor:
    """input / (1 - p) where kept, else 0, for a (rows, columns) matrix."""
    scale = 1 / (1 - dropout_p) if dropout_p < 1 else 0.0
    return torch.where(keep_mask(seed, dropout_p, *input.shape), input * scale, 0.0)


def derived_seed(seed: Tensor, number: int) -> Tensor:
    """A seed of its own for each mask that one seed decides: seed + number (2^64 / golden ratio), modulo 2^64."""
    return seed + ((number * 0x9E3779B97F4A7C15 + 2**63) % 2**64 - 2**63)
