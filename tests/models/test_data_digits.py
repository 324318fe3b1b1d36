"""What the Vision Transformer's example says of its data."""

import pytest
import torch

from examples import vit


def test_what_is_said_of_the_baselines_is_measured():
    pytest.importorskip("sklearn", reason="the digits are scikit-learn's")
    assert torch.get_default_dtype() == torch.float32
    found, (train, tuning, held_out) = vit.SYSTEM.baselines(), (
        getattr(vit.data(), name) for name in ("train", "tuning", "held_out")
    )  # fmt: skip
    said = vit.SYSTEM.about
    assert f"{len(train) + len(tuning)} images" in said.replace('" "', "")
    assert f"the nearest one says what {found[vit.NEAREST]:.1f}%" in said
    assert f"softmax regression is right for {found[vit.REGRESSION]:.1f}%" in said
    images, labels = (torch.cat([getattr(part, name) for part in (train, tuning)]) for name in ("images", "labels"))
    distances = (held_out.images[:, None] - images[None]).double().square().sum((2, 3, 4))
    assert found[vit.NEAREST] == vit.percent(labels[distances.argmin(1)], held_out.labels)
    assert "better than any network" not in said
