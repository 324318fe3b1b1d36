"""transformers' own tests of attention on the tiny models, with seqkern in the place of "sdpa". By hand:

    pip download --no-deps --no-binary :all: transformers==5.24.0 && tar xzf transformers-5.24.0.tar.gz
    pip install parameterized
    python tests/integrations/of_transformers.py transformers-5.24.0 [--torch] [arguments of pytest]

The source distribution has `ModelTesterMixin` but not its models' testers: those here stand in for them. --torch runs
the same tests on torch's sdpa, to compare the counts.
"""

from __future__ import annotations

import importlib
import os
import sys
import types
import unittest
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve()
FOLDER = "SEQKERN_TRANSFORMERS_SOURCE"
TESTS = (
    "eager_matches_sdpa or sdpa_can or can_set_attention or config_attn_implementation or attention_outputs"
    " or training or checkpointing or retain_grad or torch_compile_for_training or feed_forward_chunking or determinism"
    " or resize or batching_equivalence or inputs_embeds or left_padding or padding_matches or flex"
)
BASES = {
    "gpt2": "GPT2Model", "bert": "BertModel", "llama": "LlamaModel", "mistral": "MistralModel", "gemma2": "Gemma2Model",
    "gemma3": "Gemma3TextModel", "qwen3": "Qwen3Model", "gpt_oss": "GptOssModel", "modernbert": "ModernBertModel",
    "vit": "ViTModel", "t5": "T5Model", "bart": "BartModel", "whisper": "WhisperModel",
}  # fmt: skip


def mixin(folder: Path) -> Any:
    """ModelTesterMixin, from its file; packages of tests that the distribution leaves out are empty."""
    sys.path.insert(0, str(folder))
    package = types.ModuleType("tests")
    package.__path__ = [str(folder / "tests")]
    sys.modules["tests"] = package
    for name, classes in {"exporters.test_export": ["ExportTesterMixin"],
                          "generation.test_utils": ["GenerationTesterMixin"]}.items():  # fmt: skip
        if not (folder / "tests" / f"{name.replace('.', '/')}.py").exists():
            parent = name.partition(".")[0]
            sys.modules[f"tests.{parent}"] = types.ModuleType(f"tests.{parent}")
            stub = types.ModuleType(f"tests.{name}")
            vars(stub).update({each: type(each, (), {}) for each in classes})
            sys.modules[f"tests.{name}"] = stub
    return importlib.import_module("tests.test_modeling_common").ModelTesterMixin


def tester(name: str) -> type:
    import models
    import transformers

    class Tester:
        batch_size, seq_length, is_training = 13, 7, True
        hidden_size, num_hidden_layers, num_attention_heads = 32, 2, 4
        num_masks, mask_length = 1, 25  # of ViT's patches

        def __init__(self, parent: Any) -> None:
            self.parent = parent
            if name == "vit":
                self.seq_length = 26
            if name == "whisper":
                self.encoder_seq_length = self.key_length = 20

        def get_config(self) -> Any:
            _, config, arguments = models.MODELS[name]
            return getattr(transformers, config)(**arguments)

        def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, Any]]:
            found = models.inputs(name, self.batch_size, self.seq_length)
            if name not in ("vit", "whisper"):
                found["attention_mask"] = found["input_ids"].new_ones(found["input_ids"].shape)
            if "decoder_input_ids" in found and "input_ids" in found:
                found["decoder_input_ids"] = found["input_ids"].clone()
            return self.get_config(), found

    return Tester


def labelled(base: Any) -> Any:
    """Its inputs of a model class, with the labels that the mixin leaves to Whisper's own tests."""

    def prepare(self: Any, inputs: dict[str, Any], model: Any, return_labels: bool = False) -> dict[str, Any]:
        found: dict[str, Any] = base._prepare_for_class(self, inputs, model, return_labels)
        if return_labels and model.__name__.endswith("ForConditionalGeneration"):
            found.setdefault("labels", found["decoder_input_ids"])
        return found

    return prepare


def cases(folder: Path) -> dict[str, type]:
    import models
    import transformers

    base = mixin(folder)
    made = {}
    for name, (head, _, _) in models.MODELS.items():
        made[f"Test_{name}"] = type(
            f"Test_{name}",
            (base, unittest.TestCase),
            {
                "all_model_classes": (getattr(transformers, BASES[name]), getattr(transformers, head)),
                "is_encoder_decoder": name in ("t5", "bart", "whisper"),
                "test_resize_embeddings": False,
                "_prepare_for_class": labelled(base),
                "setUp": lambda self, name=name: setattr(self, "model_tester", tester(name)(self)),
                "__module__": __name__,
            },
        )
    return made


class Plugin:
    def __init__(self, ours: bool) -> None:
        self.ours = ours

    def pytest_sessionstart(self) -> None:
        if self.ours:
            from seqkern.integrations import transformers as integration

            self.taken = integration.takeover_sdpa()
            self.calls, attention = 0, integration.attention

            def counted(*args: Any, **options: Any) -> Any:
                self.calls += 1
                return attention(*args, **options)

            integration.attention = counted

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.ours:
            self.taken.restore()
            terminalreporter.write_line(f"{self.calls} calls of seqkern.attention")


if __name__ == "__main__":
    arguments = sys.argv[2:]
    ours = "--torch" not in arguments
    os.environ[FOLDER] = str(Path(sys.argv[1]).resolve())
    names = [] if "-k" in arguments else ["-k", TESTS]
    rest = [each for each in arguments if each != "--torch"]
    options = ["-q", "-c", os.devnull, "--rootdir", str(HERE.parent), "-p", "no:cacheprovider", "--noconftest"]
    options += ["-W", "ignore", str(HERE)]
    sys.exit(pytest.main([*options, *names, *rest], [Plugin(ours)]))
elif FOLDER in os.environ:
    sys.path.insert(0, str(HERE.parent))
    globals().update(cases(Path(os.environ[FOLDER])))
