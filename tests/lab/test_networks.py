"""The networks: sizes, shapes, initialisation, activations."""

import pytest
import torch
from torch import nn

from steptuned.lab.networks import ACTIVATIONS, NETWORKS, ONLY_32, transformer
from steptuned.lab.networks.autoencoder import autoencoder
from steptuned.lab.networks.resnet import Block
from steptuned.lab.networks.transformer import Transformer


def size(model):
    return sum(p.numel() for p in model.parameters())


def count(model, kind):
    return sum(isinstance(module, kind) for module in model.modules())


@pytest.mark.parametrize(
    ("name", "classes", "parameters"),
    [
        ("resnet-20", 10, 269_722),
        ("resnet-20", 100, 275_572),
        ("nin", 10, 969_802),
        ("nin-author", 10, 967_096),
        ("lenet", 10, 62_006),
        ("lenet-batchnorm", 10, 62_458),
    ],
)
def test_a_classifier_has_the_papers_size_and_one_score_per_class(name, classes, parameters):
    model = NETWORKS[name](classes, nn.ReLU)
    assert size(model) == parameters
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, classes)


def test_the_autoencoder_has_the_papers_size_and_gives_pixels():
    model = autoencoder()
    assert size(model) == 2_837_314
    widths = [
        (layer.in_features, layer.out_features) for layer in model if isinstance(layer, nn.Linear)
    ]
    assert widths == [
        (784, 1000),
        (1000, 500),
        (500, 250),
        (250, 30),
        (30, 250),
        (250, 500),
        (500, 1000),
        (1000, 784),
    ]
    output = model(torch.rand(3, 1, 28, 28))
    assert output.shape == (3, 784)
    assert 0 < output.min() < output.max() < 1
    code = next(
        i
        for i, layer in enumerate(model)
        if isinstance(layer, nn.Linear) and layer.out_features == 30
    )
    assert isinstance(model[code + 1], nn.Linear), "the code is linear"
    assert count(model, nn.SiLU) == 6
    assert isinstance(model[-1], nn.Sigmoid)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_activation_is_the_one_asked_for_and_no_other(name, activation):
    model = NETWORKS[name](10, ACTIVATIONS[activation])
    others = tuple(kind for kind in ACTIVATIONS.values() if kind is not ACTIVATIONS[activation])
    assert count(model, ACTIVATIONS[activation]) > 0
    assert count(model, others) == 0


@pytest.mark.parametrize(
    ("name", "norms"),
    [("resnet-20", 19), ("nin", 8), ("nin-author", 0), ("lenet", 0), ("lenet-batchnorm", 4)],
)
def test_batchnorm_is_where_table_1_has_it(name, norms):
    assert count(NETWORKS[name](10, nn.ELU), (nn.BatchNorm1d, nn.BatchNorm2d)) == norms


def test_resnet_is_initialised_by_kaiming_normal():
    torch.manual_seed(0)
    model = NETWORKS["resnet-20"](10, nn.ReLU)
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            inputs = module.weight[0].numel()
            deviation = (2 / inputs) ** 0.5
            assert module.weight.std().item() == pytest.approx(deviation, rel=0.15)
            assert module.weight.abs().max() > 2.2 * deviation, "normal, not uniform"
        if isinstance(module, nn.Conv2d):
            assert module.bias is None


def test_the_shortcut_of_a_block_has_no_parameters_and_keeps_every_other_pixel():
    block = Block(2, 4, 2, nn.ReLU).eval()
    with torch.no_grad():
        block.conv2.weight.zero_()
    x = torch.rand(1, 2, 4, 4)
    expected = torch.zeros(1, 4, 2, 2)
    expected[:, 1:3] = x[:, :, ::2, ::2]
    assert torch.equal(block(x), expected)
    assert size(block) == 2 * 4 * 9 + 4 * 4 * 9 + 4 * 4


def test_resnet_halves_the_image_twice():
    model = NETWORKS["resnet-20"](10, nn.ReLU)
    shapes = []
    for block in model.blocks:
        block.register_forward_hook(lambda _, __, output: shapes.append(tuple(output.shape[1:])))
    model(torch.randn(1, 3, 32, 32))
    assert shapes == [(16, 32, 32)] * 3 + [(32, 16, 16)] * 3 + [(64, 8, 8)] * 3


def test_nin_has_dropout_after_its_first_two_stages():
    model = NETWORKS["nin"](10, nn.ELU)
    before = [type(model[i - 1]) for i, layer in enumerate(model) if isinstance(layer, nn.Dropout)]
    assert before == [nn.MaxPool2d, nn.AvgPool2d]
    assert isinstance(model[-3], nn.Conv2d), (
        "no BatchNorm and no activation after the last convolution"
    )


def test_nin_of_the_author_shrinks_the_image_to_one_pixel_without_padding():
    model = NETWORKS["nin-author"](10, nn.ELU)
    shapes, kinds = [], (nn.Conv2d, nn.MaxPool2d, nn.AvgPool2d)
    for layer in model:
        if isinstance(layer, kinds) and layer.kernel_size not in (1, (1, 1)):
            layer.register_forward_hook(
                lambda _, __, output: shapes.append(tuple(output.shape[1:]))
            )
    model(torch.randn(2, 3, 32, 32))
    assert shapes == [
        (192, 28, 28),
        (96, 13, 13),
        (192, 9, 9),
        (192, 4, 4),
        (192, 2, 2),
        (10, 1, 1),
    ]
    before = [type(model[i - 1]) for i, layer in enumerate(model) if isinstance(layer, nn.Dropout)]
    assert before == [nn.MaxPool2d, nn.AvgPool2d]
    assert [layer.p for layer in model if isinstance(layer, nn.Dropout)] == [0.5, 0.5]
    assert count(model, nn.ELU) == 9, "after the last convolution too"
    assert (model[-1].in_features, model[-1].out_features) == (10, 10)
    with pytest.raises(RuntimeError):
        model(torch.randn(2, 3, 16, 16))


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_take_16x16_images_unless_listed_as_only_32(name):
    model, images = NETWORKS[name](10, nn.ReLU), torch.randn(2, 3, 16, 16)
    if name in ONLY_32:
        with pytest.raises(RuntimeError):
            model(images)
    else:
        assert model(images).shape == (2, 10)


@pytest.mark.parametrize(
    ("context", "width", "depth", "heads", "parameters"),
    [(64, 64, 2, 4, 116_480), (64, 32, 2, 2, 33_664), (128, 256, 6, 8, 4_820_992)],
)
def test_the_transformer_has_its_size_and_scores_for_every_place(
    context, width, depth, heads, parameters
):
    model = Transformer(96, context, width, depth, heads, 0.1)
    assert size(model) == parameters
    assert model(torch.randint(96, (2, context))).shape == (2, context, 96)
    assert model(torch.randint(96, (2, 5))).shape == (2, 5, 96), "a shorter text will do"


def test_the_transformer_is_initialised_like_gpt_2():
    torch.manual_seed(0)
    model = Transformer(96, 64, 64, 8, 4, 0.0)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            ends_branch = name.endswith(("joined", "narrow"))
            assert module.weight.std().item() == pytest.approx(
                0.02 / 4 if ends_branch else 0.02, rel=0.05
            )
        if isinstance(module, nn.Linear) and module.bias is not None:
            assert not module.bias.any()


def test_an_attention_head_matches_the_formula():
    torch.manual_seed(0)
    block = transformer.Block(6, 2, 0.0)
    x = torch.randn(1, 5, 6)
    q, k, v = block.queries_keys_values(x)[0].split(6, 1)
    heads = []
    for part in (slice(0, 3), slice(3, 6)):
        scores = q[:, part] @ k[:, part].T / 3**0.5
        heads.append(
            scores.masked_fill(torch.ones(5, 5).triu(1).bool(), float("-inf")).softmax(1)
            @ v[:, part]
        )
    torch.testing.assert_close(block._attention(x)[0], torch.cat(heads, 1))
