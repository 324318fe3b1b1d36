"""The Vision Transformer: its twin, patches by hand, attention maps, errors, learning; the digits and the example."""

import pytest
import torch

from examples import runner, twins, vit
from examples.data import digits
from seqkern.models import ViT

SHAPE = {"image_size": 6, "patch_size": 2, "num_classes": 5, "d_model": 8, "nhead": 2, "num_layers": 2}
OPTIONS = [
    {"pool": "cls"},
    {"pool": "mean"},
    {"pool": "cls", "channels": 3, "dim_feedforward": 12},
    {"pool": "mean", "channels": 3, "patch_size": 3},
]
each = pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(map(str, options.values())))


@pytest.fixture(autouse=True)
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def make(options):
    torch.manual_seed(0)
    model, twin = ViT(**SHAPE | options), twins.vit.ViT(**SHAPE | options)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    twin.load_state_dict(model.state_dict())
    return model, twin


def make_batch(channels=1, rows=3):
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(rows, channels, 6, 6, generator=generator)
    return images, torch.randint(5, (rows,), generator=generator)


@each
def test_equals_the_twin(options):
    model, twin = make(options)
    losses = [version.loss(*make_batch(options.get("channels", 1))) for version in (model, twin)]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    for (name, ours), (_, theirs) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, msg=lambda text, name=name: f"{name}: {text}")


@each
def test_an_image_does_not_see_the_others(options):
    model, _ = make(options)
    images, _ = make_batch(options.get("channels", 1))
    torch.testing.assert_close(model(images[1:2])[0], model(images)[1])


def test_patches_by_hand():
    model, _ = make({"channels": 3})
    images, _ = make_batch(3)
    found = model.patches(images)
    assert found.shape == (3, 9, 12)
    for row in range(3):
        for column in range(3):
            patch = images[:, :, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
            assert found[:, 3 * row + column].equal(patch.reshape(3, -1))


def test_patches_without_positions_are_a_set():
    """The mean of patches: positions are all that tells where one is."""
    model, _ = make({"pool": "mean"})
    images, _ = make_batch()
    swapped = images.clone()
    swapped[..., :2, :2], swapped[..., 4:, 2:4] = images[..., 4:, 2:4], images[..., :2, :2]
    assert not torch.allclose(model(images), model(swapped))
    torch.nn.init.zeros_(model.positions)
    torch.testing.assert_close(model(images), model(swapped))


@pytest.mark.parametrize("layer", [0, 1, -1])
def test_attention_maps(layer):
    """The softmax of the class token's scores, of the input that the block has."""
    model, twin = make({})
    images, _ = make_batch()
    x = model.embed(images)
    block = twin.encoder.layers[layer]
    for before in list(twin.encoder.layers)[: layer % 2]:
        x = before(x)
    attention = block.self_attn
    q, k, _ = torch.nn.functional.linear(block.norm1(x), attention.in_proj_weight, attention.in_proj_bias).chunk(3, -1)
    q, k = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in (q, k))
    weights = (q[:, :, :1] @ k.transpose(-1, -2) / 4**0.5).softmax(-1)[:, :, 0]
    found = model.attention_maps(images, layer)
    assert found.shape == (3, 2, 3, 3)
    torch.testing.assert_close(found.flatten(2), weights[..., 1:])
    torch.testing.assert_close(1 - found.sum((2, 3)), weights[..., 0])


def test_blocks_are_not_copies():
    one, two = ViT(**SHAPE).encoder.layers
    assert not one.linear1.weight.equal(two.linear1.weight)
    assert not one.self_attn.in_proj_weight.equal(two.self_attn.in_proj_weight)


def test_dropout_in_training_alone():
    torch.manual_seed(0)
    model = ViT(**SHAPE, dropout=0.5)
    images, _ = make_batch()
    assert not model(images).equal(model(images))
    model.eval()
    assert model(images).equal(model(images))


@pytest.mark.parametrize("pool", ["cls", "mean"])
def test_learns_a_batch(pool):
    torch.manual_seed(0)
    model = ViT(**SHAPE, pool=pool)
    batch = make_batch(rows=8)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(60):
        optimizer.zero_grad()
        model.loss(*batch).backward()
        optimizer.step()
    assert model.loss(*batch) < 0.05


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"patch_size": 4}, "ViT: patch_size must divide image_size 6, got 4"),
        ({"patch_size": 0}, "ViT: patch_size must divide image_size 6, got 0"),
        ({"pool": "max"}, "ViT: pool must be cls or mean, got 'max'"),
    ],
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=message):
        ViT(**SHAPE | options)


@pytest.mark.parametrize("shape", [(3, 6, 6), (3, 2, 6, 6), (3, 1, 6, 8)])
def test_images_of_another_shape(shape):
    with pytest.raises(ValueError, match=r"ViT: images must have shape \(B, 1, 6, 6\), got"):
        make({})[0](torch.rand(shape))


@pytest.mark.parametrize("pool", ["cls", "mean"])
def test_no_images(pool):
    model, _ = make({"pool": pool})
    assert model(torch.rand(0, 1, 6, 6)).shape == (0, 5)


def test_maps_need_a_class_token():
    with pytest.raises(ValueError, match="ViT: attention_maps"):
        make({"pool": "mean"})[0].attention_maps(make_batch()[0])


# ---- the digits ---------------------------------------------------------------------------------------------------


def test_digits():
    pytest.importorskip("sklearn", reason="the digits are scikit-learn's")
    found = digits.load()
    parts = [getattr(found, name) for name in digits.PARTS]
    assert sum(map(len, parts)) == digits.IMAGES
    assert len(found.held_out) == 458
    every = torch.cat([part.images for part in parts])
    assert len(every.flatten(1).unique(dim=0)) == digits.IMAGES  # so the parts have none in common
    assert every.shape[1:] == (1, 8, 8)
    assert (every.min(), every.max()) == (0, 1)
    for part in parts:
        assert part.labels.unique().tolist() == list(range(10))
    again = digits.load()
    assert again.train.images.equal(found.train.images)


def test_shifts_are_of_a_pixel():
    images = torch.rand(200, 1, 5, 5)
    moved = digits.shifted(images, torch.Generator().manual_seed(0))
    around = torch.nn.functional.pad(images, (1, 1, 1, 1))
    kinds = set()
    for before, after in zip(around, moved, strict=True):
        fits = [(y, x) for y in range(3) for x in range(3) if before[:, y : y + 5, x : x + 5].equal(after)]
        assert len(fits) == 1
        kinds |= set(fits)
    assert len(kinds) == 9


def test_softmax_regression_is_the_optimum():
    """Where the gradient of loss and penalty vanishes."""
    torch.manual_seed(0)
    inputs, labels = torch.randn(100, 4), torch.arange(100) % 10
    model = vit.softmax_regression(inputs, labels, 0.01)
    loss = torch.nn.functional.cross_entropy(model(inputs), labels) + 0.01 * model.weight.square().sum()
    for gradient in torch.autograd.grad(loss, list(model.parameters())):
        assert gradient.abs().max() < 1e-4


@pytest.mark.parametrize("variant", vit.SYSTEM.recipes)
def test_example(variant, monkeypatch):
    """Twenty steps, the same as the twin's."""
    pytest.importorskip("sklearn", reason="the digits are scikit-learn's")
    torch.set_default_dtype(torch.float32)
    monkeypatch.setattr(type(vit.SYSTEM), "baselines", lambda self: {})
    record, exhibits = runner.run(vit.SYSTEM, variant, steps=20, memory=False)
    assert record["checks"]
    assert all(check["passed"] for check in record["checks"]), record["checks"]
    assert len(exhibits) == (2 if variant == "class token" else 1)
    assert all(exhibit.figure is not None for exhibit in exhibits)


def test_baselines():
    """Each better than the one before; the figures that the example states."""
    torch.set_default_dtype(torch.float32)
    pytest.importorskip("sklearn", reason="the digits are scikit-learn's")
    found = vit.SYSTEM.baselines()
    labels = torch.cat([vit.data().train.labels, vit.data().tuning.labels])
    frequent = int(torch.bincount(labels).argmax())
    assert found["majority"] == vit.percent(torch.full((458,), frequent), vit.data().held_out.labels)
    assert found["majority"] < 15
    assert 95 < found[vit.REGRESSION] < found[vit.NEAREST] < 100
