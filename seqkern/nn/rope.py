"""Rotary position embeddings as a module."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from seqkern._keywords import explicit, refuse
from seqkern._recording import is_proxy, record_module
from seqkern.ops.rope import rope, rope_tables


class RotaryEmbedding(torch.nn.Module):
    """`seqkern.rope` with its settings. Without parameters, and nothing in the state_dict.

    Args:
        head_dim: of queries and keys.
        theta: the base of the frequencies.
        interleaved, rotary_dim: as `seqkern.rope`.
        scaling: how frequencies change for longer sequences, in the words of transformers' configurations: a mapping
            with "rope_type": "default", "linear" ("factor"), "llama3" ("factor", "low_freq_factor", "high_freq_factor",
            "original_max_position_embeddings") or "yarn" ("factor", "original_max_position_embeddings", and if wanted
            "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate").

    Shape: forward(query, key=None, positions=0, *, tables=None, sequence_dim=-2), as `seqkern.rope`; tables(positions)
    for many layers, as `seqkern.rope_tables`.

    Source: Su et al., 2021; linear: Chen et al., "Extending Context Window of Large Language Models via Positional
    Interpolation", 2023; yarn: Peng et al., "YaRN", 2023, section 3; llama3: Llama 3.1's configuration.

    Example:
        >>> import torch, seqkern
        >>> embedding = seqkern.nn.RotaryEmbedding(64, theta=500000.0)
        >>> q, k = embedding(torch.randn(2, 8, 5, 64), torch.randn(2, 2, 5, 64))
        >>> q.shape
        torch.Size([2, 8, 5, 64])
    """

    @explicit
    def __init__(
        self,
        head_dim: int,
        theta: float = 10000.0,
        *,
        interleaved: bool = False,
        rotary_dim: int | None = None,
        scaling: Mapping[str, Any] | None = None,
        **unexpected: NoReturn,
    ) -> None:
        if unexpected:
            refuse(RotaryEmbedding.__init__, unexpected, "RotaryEmbedding")
        super().__init__()
        self.head_dim, self.theta, self.interleaved = head_dim, theta, interleaved
        self.rotary_dim = head_dim if rotary_dim is None else rotary_dim
        if self.rotary_dim % 2 or not 0 < self.rotary_dim <= head_dim:
            raise ValueError(
                f"RotaryEmbedding: rotary_dim must be even and at most head_dim = {head_dim}, got {self.rotary_dim}"
            )
        self.scaling = None if scaling is None else dict(scaling)
        frequencies, self.attention_scaling = _frequencies(self.rotary_dim, float(theta), self.scaling or {})
        # float64, and no buffer: a model that is cast to 16 bits keeps it.
        self.inv_freq = frequencies
        self._cpu = tuple(frequencies.tolist())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryEmbedding:
        super()._apply(fn, recurse)
        device = fn(torch.empty(0, device=self.inv_freq.device)).device
        if device != self.inv_freq.device:
            self.inv_freq = torch.tensor(self._cpu, dtype=torch.float64, device=device)
        return self

    def tables(self, positions: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """cos and sin for `positions`: `forward`'s tables."""
        return rope_tables(
            positions, self.rotary_dim, inv_freq=self.inv_freq, scaling=self.attention_scaling, dtype=dtype
        )

    @explicit
    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        positions: Tensor | int = 0,
        *,
        tables: tuple[Tensor, Tensor] | None = None,
        sequence_dim: int = -2,
        **unexpected: NoReturn,
    ) -> tuple[Tensor, Tensor | None]:
        if unexpected:
            refuse(RotaryEmbedding.forward, unexpected, "RotaryEmbedding")
        if is_proxy(query):
            return record_module(
                self,
                {"query": query, "key": key, "positions": positions, "tables": tables, "sequence_dim": sequence_dim},
            )
        options: dict[str, Any] = {"tables": tables}
        if tables is None:
            options = {"inv_freq": self.inv_freq, "scaling": self.attention_scaling}
        return rope(
            query, key, positions, interleaved=self.interleaved, rotary_dim=self.rotary_dim, sequence_dim=sequence_dim,
            **options,
        )  # fmt: skip

    def extra_repr(self) -> str:
        shown = f"{self.head_dim}, theta={self.theta}"
        shown += f", rotary_dim={self.rotary_dim}" if self.rotary_dim != self.head_dim else ""
        shown += ", interleaved=True" if self.interleaved else ""
        return shown + (f", scaling={self.scaling}" if self.scaling else "")


# ---- frequencies for longer sequences -----------------------------------------------------------------------------


def _frequencies(rotary_dim: int, theta: float, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    """(rotary_dim / 2,) float64, and what multiplies cos and sin."""
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    inv_freq = theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float64, device="cpu") / -rotary_dim)
    if kind == "default":
        return inv_freq, 1.0
    if kind == "linear":
        return inv_freq / _number(scaling, kind, "factor"), 1.0
    if kind == "llama3":
        return _llama3(inv_freq, scaling), 1.0
    if kind == "yarn":
        return _yarn(inv_freq, rotary_dim, theta, scaling)
    raise ValueError(
        f'RotaryEmbedding: scaling["rope_type"] must be "default", "linear", "llama3" or "yarn", got {kind!r}'
    )


def _number(scaling: Mapping[str, Any], kind: str, name: str) -> float:
    value = scaling.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f'RotaryEmbedding: scaling of "{kind}" must have a number "{name}", got {value!r}')
    return float(value)


def _llama3(inv_freq: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Long waves are stretched by the factor, short ones stay, and between them one goes over into the other."""
    factor, low, high, longest = (
        _number(scaling, "llama3", name)
        for name in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    turns = longest * inv_freq / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return inv_freq * (kept + (1 - kept) / factor)


def _yarn(inv_freq: Tensor, rotary_dim: int, theta: float, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    """Peng et al. 2023: features that turn often keep their frequency, the others are interpolated."""
    factor, longest = (_number(scaling, "yarn", name) for name in ("factor", "original_max_position_embeddings"))

    def feature(turns: float) -> float:
        """The pair that turns so often within the original length."""
        return rotary_dim * math.log(longest / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = feature(scaling.get("beta_fast") or 32), feature(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary_dim - 1)
    ramp = (torch.arange(rotary_dim // 2, dtype=torch.float64, device="cpu") - first) / (max(last - first, 0) or 0.001)
    stretched = ramp.clamp(0, 1)
    attention = scaling.get("attention_factor")
    if attention is None:

        def temperature(scale: float) -> float:
            return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

        scales = [scaling.get(name) for name in ("mscale", "mscale_all_dim")]
        if scales[0] and scales[1]:
            attention = temperature(scales[0]) / temperature(scales[1])
        else:
            attention = temperature(1.0)
    return inv_freq * (1 - stretched) + inv_freq / factor * stretched, float(attention)
