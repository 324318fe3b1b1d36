"""Tiny random models of transformers, built without a network."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from torch import nn

VOCABULARY = 99
PAD = 0
_COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 40, "pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_SHARED_HEADS = {**_COMMON, "num_key_value_heads": 2, "head_dim": 8}
_WINDOW = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
_SEQ2SEQ = {"pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}

# Name: (class, configuration and its arguments)
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": (
        "GPT2LMHeadModel", "GPT2Config",
        {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2,
         "pad_token_id": PAD},
    ),
    "bert": ("BertForMaskedLM", "BertConfig", _COMMON),
    "llama": ("LlamaForCausalLM", "LlamaConfig", _SHARED_HEADS),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**_SHARED_HEADS, "sliding_window": 5}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**_SHARED_HEADS, **_WINDOW}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**_SHARED_HEADS, **_WINDOW}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", _SHARED_HEADS),
    "gpt_oss": (
        "GptOssForCausalLM", "GptOssConfig",
        {**_SHARED_HEADS, **_WINDOW, "num_local_experts": 4, "experts_implementation": "eager"},
    ),
    "modernbert": (
        "ModernBertForMaskedLM", "ModernBertConfig",
        {**_COMMON, "local_attention": 6, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2},
    ),
    "vit": (
        "ViTForImageClassification", "ViTConfig",
        {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40, "image_size": 30,
         "patch_size": 6},
    ),
    "t5": (
        "T5ForConditionalGeneration", "T5Config",
        {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "num_layers": 2, "num_heads": 4, "d_ff": 40, **_SEQ2SEQ},
    ),
    "bart": (
        "BartForConditionalGeneration", "BartConfig",
        {"vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
         "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40,
         "max_position_embeddings": 64, **_SEQ2SEQ},
    ),
    "whisper": (
        "WhisperForConditionalGeneration", "WhisperConfig",
        {"vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
         "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40,
         "max_source_positions": 20, "max_target_positions": 64, "num_mel_bins": 8, **_SEQ2SEQ},
    ),
}  # fmt: skip
CAUSAL = [name for name in MODELS if name in ("gpt2", "llama", "mistral", "gemma2", "gemma3", "qwen3", "gpt_oss")]
GENERATE = [*CAUSAL, "t5", "bart"]


def make(name: str, attention: str = "eager", **changes: Any) -> nn.Module:
    """The model in evaluation, with random weights that follow from the name."""
    model, config, arguments = MODELS[name]
    torch.manual_seed(sum(map(ord, name)))
    made = getattr(transformers, config)(**{**arguments, **changes})
    built: nn.Module = getattr(transformers, model)(made).eval()
    built.set_attn_implementation(attention)
    if hasattr(built, "generation_config"):  # generate() to the length that is asked for
        built.generation_config.eos_token_id = None
    return built


def inputs(name: str, batch: int = 2, length: int = 12, padding: str | None = None) -> dict[str, torch.Tensor]:
    """Of a forward pass: tokens and their attention mask, with four padding tokens on a side of the first row."""
    torch.manual_seed(1)
    if name == "vit":
        return {"pixel_values": torch.randn(batch, 3, 30, 30)}
    tokens = torch.randint(3, VOCABULARY, (batch, length))
    if name == "whisper":
        return {"input_features": torch.randn(batch, 8, 40), "decoder_input_ids": tokens}
    found = {"input_ids": tokens}
    if padding:
        mask = torch.ones_like(tokens)
        mask[0, slice(4) if padding == "left" else slice(-4, None)] = 0
        found |= {"attention_mask": mask, "input_ids": tokens.masked_fill(mask == 0, PAD)}
    if name in ("t5", "bart"):
        found["decoder_input_ids"] = torch.randint(3, VOCABULARY, (batch, length - 5))
    return found


def forward_backward(model: nn.Module, call: dict[str, torch.Tensor], seen: Callable[[Any], Any]) -> list[torch.Tensor]:
    """Logits and the gradients of all parameters, where `seen` of the logits are the loss."""
    model.zero_grad()
    logits = seen(model(**call).logits)
    logits.square().sum().backward()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [logits.detach(), *grads]
