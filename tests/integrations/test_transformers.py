"""`attn_implementation="seqkern"`: tiny models of transformers against their own eager and sdpa attention."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytest.importorskip("transformers", reason="needs transformers: pip install 'seqkern[transformers]'")

import transformers
from models import GENERATE, MODELS, forward_backward, inputs, make
from packaging import version
from transformers import AttentionInterface, DynamicCache, StaticCache
from transformers import masking_utils as masking
from transformers.masking_utils import AttentionMaskInterface

import seqkern
from seqkern.integrations import transformers as integration
from seqkern.integrations import transformers_masks
from seqkern.integrations.transformers import takeover_sdpa
from seqkern.integrations.transformers_masks import Mask, Pattern, read

ROOT = Path(__file__).parents[2]
# What a forward pass names its cache: the older name warns where there is the newer one.
CACHE = "cache" if version.parse(transformers.__version__) >= version.parse("5.24") else "past_key_values"
PADDINGS = (None, "left", "right")
# sdpa has no softcap and, in its mask, no sinks; T5's relative bias runs in both.
WITHOUT_SDPA = ("gemma2", "gpt_oss")
EAGER = 1e-6  # its softmax is float32's


@pytest.fixture(scope="module", autouse=True)
def registered():
    assert integration.register() == "seqkern"


def close(found: list[torch.Tensor], expected: list[torch.Tensor], unit: float = 1e-11) -> None:
    for x, y in zip(found, expected, strict=True):
        x, y = x.detach(), y.detach()
        error = float((x - y).abs().max())
        assert error <= 10 * unit * max(1.0, float(y.abs().max())), error


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("name", MODELS)
def test_forward_and_backward(name: str, padding: str | None) -> None:
    if padding and name in ("vit", "whisper"):
        pytest.skip("this model takes no padding")
    model, call = make(name), inputs(name, padding=padding)
    if name not in WITHOUT_SDPA:  # eager hides with the least number of float32
        model, call = model.double(), {key: x.double() if x.is_floating_point() else x for key, x in call.items()}
    rows = call["attention_mask"].bool() if padding and "decoder_input_ids" not in call else slice(None)
    model.set_attn_implementation("eager" if name in WITHOUT_SDPA else "sdpa")
    expected = forward_backward(model, call, lambda logits: logits[rows])
    model.set_attn_implementation("seqkern")
    found = forward_backward(model, call, lambda logits: logits[rows])
    close(found, expected, EAGER if name in WITHOUT_SDPA else 1e-11)


@pytest.mark.parametrize("padding", [None, "left"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", GENERATE)
def test_greedy_generation(name: str, cache: str, padding: str | None) -> None:
    call = inputs(name, padding=padding)
    call.pop("decoder_input_ids", None)
    options = {"max_new_tokens": 6, "do_sample": False}
    if cache == "static":
        options["cache_implementation"] = "static"
    model = make(name)
    expected = model.generate(**call, **options)
    model.set_attn_implementation("seqkern")
    assert torch.equal(model.generate(**call, **options), expected)


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_beam_search(name: str) -> None:
    call = inputs(name, padding="left")
    call.pop("decoder_input_ids", None)
    model = make(name)
    expected = model.generate(**call, max_new_tokens=5, num_beams=3, do_sample=False)
    model.set_attn_implementation("seqkern")
    assert torch.equal(model.generate(**call, max_new_tokens=5, num_beams=3, do_sample=False), expected)


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "gpt_oss"])
def test_prompt_in_chunks(name: str, kind: type) -> None:
    """A prompt of 12 tokens, four at a time, past the window of 5: as the whole prompt at once."""
    model, tokens = make(name, "seqkern").double(), inputs(name)["input_ids"]
    expected = model(tokens).logits
    cache = kind(config=model.config) if kind is DynamicCache else kind(config=model.config, max_cache_len=20)
    parts = [model(tokens[:, i : i + 4], **{CACHE: cache}).logits for i in range(0, 12, 4)]
    close([torch.cat(parts, 1)], [expected])


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3", "gpt_oss"])
def test_packed_sequences(name: str) -> None:
    """Several sequences in a row, told by their positions: each as alone. gpt-oss makes its masks without positions."""
    model = make(name, "seqkern").double()
    tokens = inputs(name, batch=2, length=12)["input_ids"]
    positions = torch.tensor([[*range(7), *range(5)], [*range(3), *range(9)]])
    found = model(tokens, position_ids=positions, use_cache=False).logits
    model.set_attn_implementation("eager")
    close([found], [model(tokens, position_ids=positions, use_cache=False).logits], EAGER)
    if name == "gpt_oss":
        return
    model.set_attn_implementation("seqkern")
    for row, (start, end) in ((0, (0, 7)), (0, (7, 12)), (1, (0, 3)), (1, (3, 12))):
        close([found[row, start:end]], [model(tokens[row : row + 1, start:end]).logits[0]])


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_packed_by_boundaries(name: str) -> None:
    """cu_seq_lens, as the collators for flash attention give them."""
    model = make(name, "seqkern").double()
    tokens = inputs(name, batch=1, length=12)["input_ids"]
    positions, starts = torch.tensor([[*range(7), *range(5)]]), torch.tensor([0, 7, 12], dtype=torch.int32)
    found = model(
        tokens, position_ids=positions, use_cache=False, cu_seq_lens_q=starts, cu_seq_lens_k=starts, max_length_q=7,
        max_length_k=7,
    ).logits  # fmt: skip
    model.set_attn_implementation("eager")
    close([found], [model(tokens, position_ids=positions, use_cache=False).logits], EAGER)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float64])
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_mask_of_the_user(name: str, dtype: torch.dtype) -> None:
    """Four dimensions: handed on as it is, nothing is added to it."""
    call = inputs(name)
    keys = call["input_ids"].shape[1]
    visible = torch.rand(2, 1, keys, keys) < 0.6
    visible |= torch.eye(keys, dtype=torch.bool)
    mask = visible if dtype == torch.bool else torch.where(visible, 0.0, -1e9).to(dtype)
    masked = "attention_mask"
    if name == "t5":
        masked, call["decoder_input_ids"] = "decoder_attention_mask", call["input_ids"]
    model = make(name, "sdpa").double()
    expected = model(**call | {masked: mask}).logits
    model.set_attn_implementation("seqkern")
    close([model(**call | {masked: mask}).logits], [expected])
    assert (expected - model(**call).logits).abs().max() > 1e-4


@pytest.mark.parametrize("padding", [None, "left"])
@pytest.mark.parametrize("name", MODELS)
def test_compiles_whole(name: str, padding: str | None) -> None:
    if padding and (name in ("vit", "whisper") or name in WITHOUT_SDPA):
        pytest.skip("takes no padding, or differs from eager there")
    model, call = make(name), inputs(name, padding=padding)
    if name == "gpt_oss":
        model.set_experts_implementation("batched_mm")
    model.set_attn_implementation("eager" if name in WITHOUT_SDPA else "sdpa")
    with torch.no_grad():
        expected = model(**call).logits
        if version.parse(torch.__version__) < version.parse("2.13") and model.config.is_encoder_decoder:
            with pytest.raises(torch._dynamo.exc.Unsupported, match="copy.deepcopy"):
                torch.compile(model, fullgraph=True, backend="eager")(**call)
            pytest.skip("torch before 2.13 compiles no encoder-decoder model of transformers whole")
        model.set_attn_implementation("seqkern")
        torch._dynamo.reset()
        found = torch.compile(model, fullgraph=True, backend="eager")(**call).logits
    rows = call["attention_mask"].bool() if padding and "decoder_input_ids" not in call else slice(None)
    assert torch.allclose(found[rows], expected[rows], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_compiles_layer_by_layer(name: str) -> None:
    """The mask is made outside of what is compiled."""
    model, call = make(name, "seqkern"), inputs(name, padding="left")
    with torch.no_grad():
        expected = model(**call).logits
        for layer in model.model.layers:
            layer.compile(fullgraph=True, backend="eager")
        assert torch.equal(model(**call).logits, expected)


def test_exports() -> None:
    model, call = make("llama", "seqkern"), {"input_ids": inputs("llama")["input_ids"], "use_cache": False}
    program = torch.export.export(model, (), call)
    assert torch.allclose(program.module()(**call).logits, model(**call).logits, atol=1e-5)


class LargestTensor(TorchDispatchMode):
    """The elements of the largest tensor that any op returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and not isinstance(x, Mask):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())
        return result


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("vit", "whisper", "t5", "gpt_oss")])
def test_no_quadratic_tensor(name: str, padding: str | None) -> None:
    """A batch of 1024 tokens with padding, forward and backward: no op returns N * N elements."""
    length = 1024
    changes = {"vocab_size": 99} | ({"n_positions": length} if name == "gpt2" else {"max_position_embeddings": length})
    model, call = make(name, "seqkern", **changes), inputs(name, length=length, padding=padding)
    with LargestTensor() as largest:
        forward_backward(model, call, lambda logits: logits)
    assert largest.elements <= length * length / 4
    model.set_attn_implementation("eager")
    with LargestTensor() as largest:
        forward_backward(model, call, lambda logits: logits)
    assert largest.elements >= length * length


def test_patterns_that_are_read() -> None:
    """By identity, and nothing else: a function with the same name is another function."""
    assert read(masking.causal_mask_function) == Pattern(causal=True)
    assert read(masking.bidirectional_mask_function) == Pattern(causal=False)
    assert read(masking.sliding_window_causal_mask_function(7)) == Pattern(causal=True, window=7)
    assert read(masking.sliding_window_bidirectional_mask_function(7)) == Pattern(causal=False, window=8)

    def causal_mask_function(batch, head, query, key):
        return key < query

    assert read(causal_mask_function) is None
    assert read(masking.or_masks(masking.causal_mask_function, masking.bidirectional_mask_function)) is None
    assert read(masking.and_masks(masking.causal_mask_function, causal_mask_function)) is None
    assert read(masking.chunked_causal_mask_function(4, torch.zeros(1))) is None
    assert read(lambda *indices: indices[3] <= indices[2]) is None


@pytest.mark.parametrize("q_offset", [0, 3, torch.tensor(3)])
@pytest.mark.parametrize("kv_offset", [0, 2])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    "function",
    [
        masking.causal_mask_function,
        masking.bidirectional_mask_function,
        masking.sliding_window_causal_mask_function(3),
        masking.sliding_window_bidirectional_mask_function(2),
    ],
)
def test_stored_masks_are_those_of_transformers(function, q_offset, kv_offset, padded) -> None:
    call = {"batch_size": 2, "q_length": 5, "kv_length": 9, "q_offset": q_offset, "kv_offset": kv_offset}
    call |= {"mask_function": function}
    if padded:
        call["attention_mask"] = torch.rand(2, 8, generator=torch.Generator().manual_seed(0)) < 0.7
    expected = masking.sdpa_mask(**call, allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    found = transformers_masks.mask(**call, allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    assert isinstance(found, Mask)
    assert found.shape == expected.shape
    # What a mask without padding leaves out of it is hidden by the pattern.
    assert torch.equal(found.stored(), expected)
    assert torch.equal(found[:, :, 1:], expected[:, :, 1:])
    assert torch.equal(torch.where(found, 0.0, -1.0), torch.where(expected, 0.0, -1.0))
    query, key = torch.randn(2, 4, 5, 8).double(), torch.randn(2, 2, 9, 8).double()
    out, _ = integration.attention_forward(torch.nn.Module(), query, key, key, found)
    close([out], [seqkern.attention(query, key, key, attn_mask=expected).transpose(1, 2)])


def test_a_stored_mask_is_what_everything_else_gets() -> None:
    """The case that only a stored mask can say: a function that is not known. Here an image that sees all of itself."""
    model, tokens = make("llama", "seqkern").double(), inputs("llama")["input_ids"]
    masks = []
    original = transformers_masks.mask

    def seen(**call):
        masks.append(original(**call))
        return masks[-1]

    AttentionMaskInterface.register("seqkern", seen)
    try:
        model(tokens)
        assert masks == [None]
        function = masking.or_masks(masking.causal_mask_function, lambda b, h, q, k: (q < 4) & (k < 4))
        found = original(batch_size=2, q_length=12, kv_length=12, mask_function=function)
        assert type(found) is torch.Tensor
    finally:
        integration.register()
    expected = masking.sdpa_mask(
        batch_size=2, q_length=12, kv_length=12, mask_function=function, allow_is_causal_skip=False
    )
    assert torch.equal(found, expected)
    assert found[0, 0, 0].sum() == 4


def test_static_cache_reads_what_is_there() -> None:
    """The empty end of a static cache may hold anything: it is cut off, not masked."""
    query, key = torch.randn(2, 4, 3, 8), torch.full((2, 2, 64, 8), torch.nan)
    key[:, :, :10] = torch.randn(2, 2, 10, 8)
    mask = transformers_masks.mask(batch_size=2, q_length=3, kv_length=64, q_offset=torch.tensor(7))
    out, _ = integration.attention_forward(torch.nn.Module(), query, key, key, mask)
    expected = seqkern.attention(query, key[:, :, :10], key[:, :, :10], causal=True).transpose(1, 2)
    assert torch.equal(out, expected)


def test_dropout_window_sinks_and_softcap_arrive() -> None:
    query, key = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8)
    mask = transformers_masks.mask(
        batch_size=1, q_length=6, kv_length=6, mask_function=masking.sliding_window_causal_mask_function(3)
    )
    sinks = torch.randn(4)
    call = {"dropout": 0.3, "scaling": 0.2, "softcap": 1.5, "s_aux": sinks}
    torch.manual_seed(0)
    out, weights = integration.attention_forward(torch.nn.Module(), query, key, key, mask, **call)
    torch.manual_seed(0)
    expected = seqkern.attention(
        query, key, key, causal=True, window=(2, 0), dropout_p=0.3, scale=0.2, softcap=1.5, sinks=sinks
    )
    assert weights is None
    assert torch.equal(out, expected.transpose(1, 2))


def test_position_bias_has_its_gradient() -> None:
    model, call = make("t5", "sdpa").double(), inputs("t5", padding="right")
    name = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    grads = []
    for attention in ("sdpa", "seqkern"):
        model.set_attn_implementation(attention)
        forward_backward(model, call, lambda logits: logits)
        grads.append(dict(model.named_parameters())[name].grad.clone())
    assert grads[0].abs().max() > 1e-6
    close(grads[:1], grads[1:])


def test_gradient_checkpointing_and_training() -> None:
    model, call = make("mistral", "seqkern").double().train(), inputs("mistral", padding="left")
    expected = forward_backward(model, call, lambda logits: logits)
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    close(forward_backward(model, call, lambda logits: logits), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "gemma2", "t5", "gpt_oss"])
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    """As near to the model in float64 as eager attention is."""
    call = inputs(name, padding="right")
    if name == "t5":
        call.pop("attention_mask")
    model = make(name).to(dtype)
    rows = call["attention_mask"].bool() if "attention_mask" in call else slice(None)
    with torch.no_grad():
        half = {}
        for attention in ("eager", "seqkern"):
            model.set_attn_implementation(attention)
            half[attention] = model(**call).logits[rows].double()
        model.set_attn_implementation("eager")
        exact = model.double()(**call).logits[rows]
    errors = {attention: (found - exact).norm() / exact.norm() for attention, found in half.items()}
    assert errors["seqkern"] <= 1.5 * errors["eager"] + torch.finfo(dtype).eps


def test_attention_weights_are_missed_aloud(caplog) -> None:
    x = torch.randn(1, 2, 3, 8)
    out, weights = integration.attention_forward(torch.nn.Module(), x, x, x, None, output_attentions=True)
    assert weights is None
    assert out.shape == (1, 3, 2, 8)


# ---- takeover of "sdpa" --------------------------------------------------------------------------------------------


def test_takeover_and_restore() -> None:
    before = AttentionInterface()["sdpa"], AttentionMaskInterface()["sdpa"]
    model, tokens = make("mistral", "sdpa").double(), inputs("mistral")["input_ids"]
    expected = model(tokens).logits
    with takeover_sdpa() as takeover:
        assert AttentionInterface()["sdpa"] is integration.attention_forward
        close([model(tokens).logits], [expected])
        with pytest.raises(RuntimeError, match="restore\\(\\) the first"):
            takeover_sdpa()
    assert before == (AttentionInterface()["sdpa"], AttentionMaskInterface()["sdpa"])
    with pytest.raises(RuntimeError, match="restored already"):
        takeover.restore()
    with pytest.raises(ZeroDivisionError), takeover_sdpa():
        raise ZeroDivisionError
    assert before == (AttentionInterface()["sdpa"], AttentionMaskInterface()["sdpa"])


@pytest.mark.slow  # 40 s: its worker waits
def test_continuous_batching_in_the_place_of_sdpa() -> None:
    model = make("llama", "sdpa")
    prompts = [[5, 6, 7, 8], [9, 10], [11, 12, 13, 14, 15, 16]]
    expected = [model.generate(torch.tensor([p]), max_new_tokens=5, do_sample=False)[0, len(p) :] for p in prompts]
    calls = []
    original = integration._packed

    def packed(*arguments):
        calls.append(arguments[0].shape)
        return original(*arguments)

    config = transformers.GenerationConfig(max_new_tokens=5, do_sample=False, eos_token_id=-1, pad_token_id=0)
    integration._packed = packed
    try:
        with takeover_sdpa():
            outputs = model.generate_batch(prompts, generation_config=config)
    finally:
        integration._packed = original
    found = sorted((output.prompt_ids, output.generated_tokens) for output in outputs.values())
    for (_, tokens), (_, reference) in zip(found, sorted(zip(prompts, expected, strict=True)), strict=True):
        assert tokens == reference.tolist()
    assert calls  # by their boundaries, not by the stored mask


# ---- what is missing ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("raise ImportError('none here')", "needs transformers >= 5.4: pip install"),
        ("__version__ = '4.40.0'", "needs transformers >= 5.4"),
    ],
)
def test_missing_or_old_transformers(tmp_path: Path, source: str, message: str) -> None:
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "__init__.py").write_text(source)
    program = "import seqkern\nimport seqkern.integrations.transformers"
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT / 'editable'}", "PATH": "/usr/bin:/bin"}
    run = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert run.returncode
    assert message in run.stderr


def test_importing_seqkern_imports_no_transformers() -> None:
    program = "import seqkern, seqkern.integrations, sys; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)
