"""Attention of transformers' models: one call, then `attn_implementation="seqkern"`.

    import seqkern.integrations.transformers as integration
    integration.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="seqkern")  # or, of a model that is there:
    model.set_attn_implementation("seqkern")

Every model that goes through transformers' attention interface runs, most of them do. Causal masks, sliding windows,
padding and packed sequences are options of the kernels, so that training and prefill take memory that grows with N;
any other mask is stored as transformers stores it (seqkern/integrations/transformers_masks.py), and is exact.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from typing import Any

import torch
from torch import Tensor, nn

from seqkern.ops.attention import attention, attention_varlen

try:
    import transformers
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    from transformers.utils import logging
except ImportError as error:
    raise ImportError(
        "seqkern.integrations.transformers needs transformers >= 5.4: pip install 'transformers>=5.4'"
        f" (what failed: {error})"
    ) from error
if "q_length" not in inspect.signature(sdpa_mask).parameters:  # masks were made from positions before 5.4
    raise ImportError(
        f"seqkern.integrations.transformers needs transformers >= 5.4, found {transformers.__version__}:"
        " its masks are made in another way"
    )

from seqkern.integrations.transformers_masks import Mask, mask

NAME = "seqkern"
logger = logging.get_logger(__name__)


def register() -> str:
    """Makes "seqkern" an `attn_implementation` of transformers, and returns that name.

    It registers an attention function and a mask function (without the second there would be no mask at all). Calling
    it again changes nothing. Models that run now are not touched: `model.set_attn_implementation("seqkern")`.

    Raises:
        ImportError: on import of this module, when transformers is missing or older than 5.4.

    Example:
        >>> import seqkern.integrations.transformers as integration
        >>> integration.register()
        'seqkern'
    """
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, mask)
    return NAME


class takeover_sdpa(contextlib.ContextDecorator):
    """Puts seqkern in the place of transformers' "sdpa", until `restore()` or the end of a `with` block.

    For what accepts the name "sdpa" alone: continuous batching (`model.generate_batch`) and transformers' own tests. It
    holds for the whole process and every model whose attention is "sdpa".

    Raises:
        RuntimeError: it is in force already, or, by `restore()`, no longer.

    Example:
        >>> from seqkern.integrations.transformers import takeover_sdpa
        >>> with takeover_sdpa():
        ...     pass  # outputs = model.generate_batch(...)
    """

    _lock = threading.Lock()
    _before: tuple[Any, Any] | None = None

    def __init__(self) -> None:
        with takeover_sdpa._lock:
            if takeover_sdpa._before is not None:
                raise RuntimeError('takeover_sdpa: "sdpa" is seqkern\'s already; restore() the first takeover first')
            takeover_sdpa._before = AttentionInterface()["sdpa"], AttentionMaskInterface()["sdpa"]
            AttentionInterface.register("sdpa", attention_forward)
            AttentionMaskInterface.register("sdpa", mask)

    def restore(self) -> None:
        """Gives "sdpa" back to what it was."""
        with takeover_sdpa._lock:
            if takeover_sdpa._before is None:
                raise RuntimeError('takeover_sdpa: "sdpa" was restored already')
            forward, make_mask = takeover_sdpa._before
            AttentionInterface.register("sdpa", forward)
            AttentionMaskInterface.register("sdpa", make_mask)
            takeover_sdpa._before = None

    def __enter__(self) -> takeover_sdpa:
        return self

    def __exit__(self, *error: object) -> None:
        self.restore()


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    output_attentions: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query (B, H, Nq, D), key and value (B, Hk, Nk, D); returns (B, Nq, H, D).

    `attention_mask` is what `mask` made, or a mask (B, 1 or H, Nq, Nk), bool or added to the scores, which then holds
    everything that is hidden. Attention weights are not returned: attn_implementation="eager" has them.
    """
    if output_attentions:
        logger.warning_once('"seqkern" attention returns no attention weights: attn_implementation="eager" does.')
    options: dict[str, Any] = {"dropout_p": dropout, "scale": scaling, "softcap": softcap, "sinks": s_aux}
    if query.shape[0] != key.shape[0]:  # learned queries
        query = query.expand(key.shape[0], -1, -1, -1)
    if cu_seq_lens_q is not None and cu_seq_lens_k is not None and position_bias is None:
        causal = not isinstance(attention_mask, Mask) or attention_mask.pattern.causal
        if _covers(cu_seq_lens_q, query) and _covers(cu_seq_lens_k, key):
            options |= {"causal": causal, "window": _window(sliding_window, causal)}
            return _packed(query, key, value, cu_seq_lens_q, cu_seq_lens_k, options), None
    if isinstance(attention_mask, Mask):
        if attention_mask.shape[2:] == (query.shape[2], key.shape[2]):
            pattern = attention_mask.pattern
            options |= {"causal": pattern.causal, "window": _window(pattern.window, pattern.causal)}
            if pattern.sequences is None:
                found = _by_options(query, key, value, attention_mask, position_bias, options)
                if found is not None:
                    return found, None
            elif position_bias is None and attention_mask.padding is None:
                starts = attention_mask.starts()
                return _packed(query, key, value, starts, starts, options), None
            options |= {"causal": False, "window": None}
        attention_mask = attention_mask.stored()
    elif attention_mask is None:
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        options["causal"] = query.shape[2] > 1 and bool(causal)
        options["causal_align"] = "upper_left"  # where they differ: a prompt and the empty end of a static cache
    elif attention_mask.dtype not in (torch.bool, torch.float32, query.dtype):
        attention_mask = attention_mask.to(query.dtype)
    return _attention(query, key, value, attention_mask, position_bias, options), None


def _window(size: int | None, causal: bool) -> tuple[int, int] | None:
    """Of `attention`, from the number of keys that a query sees to one side, itself included."""
    return None if size is None else (size - 1, 0 if causal else size - 1)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, bias: Tensor | None, options: dict[str, Any]
) -> Tensor:
    if bias is not None:
        bias = bias[..., : key.shape[2]].to(query.dtype)
        if mask is None:
            mask = bias
        elif mask.dtype == torch.bool:
            mask = torch.where(mask, bias, -torch.inf)
        else:
            mask = bias + mask
    out = attention(query, key, value, attn_mask=mask, return_lse=False, **options)
    return out.transpose(1, 2).contiguous()


def _by_options(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask, bias: Tensor | None, options: dict[str, Any]
) -> Tensor | None:
    """With the mask's causality and window as options; None where the kernels have no such alignment."""
    queries, keys = mask.shape[2:]
    pattern, padding = mask.pattern, mask.padding
    if pattern.causal:
        # The last query stands at the last key that any query sees: the empty end of a static cache is left out.
        keys = mask.offset + queries
        if not 0 < keys <= mask.shape[3]:
            return None
        key, value = key[:, :, :keys], value[:, :, :keys]
        padding = None if padding is None else padding[:, :keys]
    elif pattern.window is not None and mask.offset != keys - queries:
        return None
    row = None if padding is None else padding[:, None, None]
    return _attention(query, key, value, row, bias, options)


def _covers(starts: Tensor, rows: Tensor) -> bool:
    """Whether the sequences between these boundaries are all rows of a batch of one."""
    return rows.shape[0] == 1 and starts.dim() == 1 and int(starts[-1]) == rows.shape[2]


def _packed(
    query: Tensor, key: Tensor, value: Tensor, starts_q: Tensor, starts_k: Tensor, options: dict[str, Any]
) -> Tensor:
    """All sequences of the batch one behind another."""
    batch, _, queries, _ = query.shape
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (query, key, value))
    longest = [int(starts.diff().max()) for starts in (starts_q, starts_k)]
    out = attention_varlen(q, k, v, starts_q, starts_k, *longest, return_lse=False, **options)
    return out.unflatten(0, (batch, queries))
