"""What problems on CIFAR-10, CIFAR-100 and MNIST share: data, mini-batches and evaluation."""

import functools
from abc import abstractmethod
from contextlib import AbstractContextManager, ExitStack
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from steptuned import frozen_statistics
from steptuned.lab.data import reading
from steptuned.lab.data.batches import PAD, Batches, halved, mean_and_deviation
from steptuned.lab.data.sets import SETS, DataError
from steptuned.lab.networks import ACTIVATIONS
from steptuned.lab.options import Count, Whole, one_of
from steptuned.lab.problems.base import Batch, NetworkProblem, ProblemOptions, Stream
from steptuned.lab.problems.mode import as_trained, as_used
from steptuned.lab.spec import derive_seed


class ImageOptions(ProblemOptions):
    data: Annotated[str, one_of(SETS)] = "cifar-10"
    activation: Annotated[str, one_of(ACTIVATIONS)] = "relu"
    layout: Literal["contiguous", "channels_last"] = "contiguous"
    batch: Count = 128
    weight_decay: float = 1e-4
    rows: Whole = 0
    """Training images; 0: all."""
    test_rows: Whole = 0
    """Test images; 0: all."""
    normalisation: Literal["channel", "none"] = "channel"
    augmentation: Literal["none", "standard"] = "none"
    precision: Literal["float32", "bfloat16"] = "float32"
    eval_rows: Whole = 0
    """Training images that the logged J and plain loss are computed on; 0: all.

    They are a fixed random subset, the same for every method and seed, evaluated in mini-batches
    of the training batch size.
    """

    @property
    def training_rows(self) -> int:
        return self.rows or SETS[self.data].train_rows


class ImageProblem(NetworkProblem):
    """A loss of images + lambda/2 |theta|^2.

    The J that is logged is the one that is minimised, over all mini-batches in a fixed order:
    BatchNorm uses their own statistics, dropout the same masks at every evaluation. Test images
    are evaluated with the network in evaluation mode.
    """

    def __init__(
        self,
        options: ImageOptions,
        seed: int,
        device: torch.device,
        network: str,
        *,
        halve: bool = False,
        statistics: Literal["both", "first"] = "both",
    ) -> None:
        """``halve`` the size of the images; ``statistics``: see `Images.Options`."""
        self.options, self.device, self._statistics = options, device, statistics
        self.train, self.test = _batches(reading.load(options.data), options, halve, device)
        self._logged = _chosen(len(self.train), options)
        self.weight_decay = options.weight_decay
        with torch.random.fork_rng(devices=[]):
            point = options.data, network, options.activation, seed
            torch.manual_seed(derive_seed("initial point", *point))
            model = self._network()
        model.to(device)
        if options.layout == "channels_last":
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.set_model(model)
        self._frozen = ExitStack()
        parts = [options.data, options.rows, options.batch, seed]
        self.stream = Stream(len(self.train), options.batch, reshuffled=True, seed_parts=parts)
        self._changes = torch.Generator().manual_seed(derive_seed("augmentation", *parts))
        self._ready: tuple[Tensor, Tensor, Tensor] | None = None

    # ------------------------------------------------------------------ what is minimised

    @abstractmethod
    def _network(self) -> nn.Module: ...

    @abstractmethod
    def _criterion(self, output: Tensor, x: Tensor, y: Tensor) -> Tensor: ...

    @abstractmethod
    def _measured(self, output: Tensor, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """What is logged about a mini-batch: ``loss`` and others."""

    def draw(self) -> Tensor:
        """The rows and, with augmentation, the change of each image: shift down, right, flip."""
        rows = self.stream.next()
        if self.options.augmentation == "none":
            return rows
        shifts = torch.randint(0, 2 * self.train.pad + 1, (len(rows), 2), generator=self._changes)
        flips = torch.randint(0, 2, (len(rows), 1), generator=self._changes)
        return torch.cat((rows[:, None], shifts, flips), 1)

    def loss(self, batch: Batch) -> Tensor:
        x, y = self.inputs(batch)
        with self._autocast():
            return self._criterion(self.replica(x), x, y)

    def inputs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The images and labels of a mini-batch, prepared once for both passes over it."""
        if batch is None:
            return self.train.rows(torch.arange(len(self.train)))
        if self._ready is None or self._ready[0] is not batch:
            x, y = self.train.rows(batch) if batch.dim() == 1 else self.train.augmented(*batch.T)
            self._ready = batch, x, y
        return self._ready[1:]

    def second_pass(self, second: bool) -> None:
        self._frozen.close()
        if second and self._statistics == "first":
            self._frozen.enter_context(frozen_statistics(self.model))

    def _autocast(self) -> AbstractContextManager[Any]:
        enabled = self.options.precision == "bfloat16"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=enabled)

    # ------------------------------------------------------------------ what is logged

    @property
    def evaluated(self) -> int:
        return len(self._logged) + len(self.test)

    def evaluate(self) -> dict[str, float]:
        with as_trained(self.model, self.device), self._autocast():
            train = self._over(self.train, self._logged)
            squares = torch.stack([p.square().sum() for p in self.parameters])
        # Every rank has its own BatchNorm statistics until the next forward pass.
        self.ranks.broadcast(self.model.buffers())
        with as_used(self.model), self._autocast():
            test = self._over(self.test, torch.arange(len(self.test)))
        penalty = self.weight_decay / 2 * squares.cpu().double().sum().item()
        return {
            "loss": train["loss"] + penalty,
            "plain loss": train["loss"],
            "test loss": test.pop("loss"),
            **test,
        }

    def _over(self, images: Batches, which: Tensor) -> dict[str, float]:
        """The means over these images."""

        def measured(rows: Tensor) -> dict[str, Tensor]:
            x, y = images.rows(rows)
            return self._measured(self.model(x), x, y)

        return self._means(which, measured)

    # ------------------------------------------------------------------ resuming

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"changes": self._changes.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._changes.set_state(state["changes"])


@functools.lru_cache(maxsize=1)
def _batches(
    images: reading.Images, options: ImageOptions, halve: bool, device: torch.device
) -> tuple[Batches, Batches]:
    """The training and the test images.

    They are kept for the next run in this process, which mostly has the same options.
    """
    kept = _subset(len(images.train), options, "rows")
    kept_test = _subset(len(images.test), options, "test_rows")
    train, test, pad = images.train[kept], images.test[kept_test], PAD
    if halve:
        train, test, pad = halved(train), halved(test), PAD // 2
    standard = mean_and_deviation(train) if options.normalisation == "channel" else None
    layout = options.layout == "channels_last"
    train_labels, test_labels = images.train_labels[kept], images.test_labels[kept_test]
    return (
        Batches(train, train_labels, device, layout, standard, pad),
        Batches(test, test_labels, device, layout, standard, pad),
    )


def _subset(there: int, options: ImageOptions, key: Literal["rows", "test_rows"]) -> Tensor | slice:
    """All images, or a fixed random subset that is the same for every method and seed."""
    data, wanted = options.data, options.rows if key == "rows" else options.test_rows
    if not wanted:
        return slice(None)
    if wanted > there:
        raise DataError(f"{key} = {wanted}: {data} has {there} such images; 0 means all of them")
    seed = derive_seed("subset", "train" if key == "rows" else "test", data)
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(there, generator=generator)[:wanted]


def _chosen(there: int, options: ImageOptions) -> Tensor:
    """The training images that the logged J is computed on."""
    wanted = options.eval_rows
    if not wanted:
        return torch.arange(there)
    if wanted > there:
        raise DataError(
            f"eval_rows = {wanted}: there are {there} training images; 0 means all of them"
        )
    generator = torch.Generator().manual_seed(derive_seed("subset", "evaluation", options.data))
    return torch.randperm(there, generator=generator)[:wanted]
