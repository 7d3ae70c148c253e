"""Classification of CIFAR-10, CIFAR-100 or MNIST by a network, as in the paper's problems (a), (b), (c), (e) and (f)."""

from contextlib import AbstractContextManager, ExitStack
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from steptuned import frozen_statistics
from steptuned.lab.data.batches import PAD, Batches, halved
from steptuned.lab.data.reading import load
from steptuned.lab.data.sets import SETS, DataError
from steptuned.lab.networks import ACTIVATIONS, NETWORKS, ONLY_32
from steptuned.lab.problems.base import Batch, NetworkProblem, Stream
from steptuned.lab.problems.mode import as_trained, as_used
from steptuned.lab.spec import derive_seed


class Images(NetworkProblem):
    """J = mean cross-entropy + lambda/2 |theta|^2.

    The J that is logged is the one that is minimised, over all mini-batches of a fixed order: BatchNorm by their own statistics,
    dropout with masks that are the same at every evaluation. Test images are judged by the network as one would use it.

    ``size = 16`` reduces CIFAR's 32x32 images to 16x16: means of 2x2 pixels, stored as float32, in
    which they are exact. They are standardised by the statistics of the 16x16 training images, and
    augmentation pads them by 2 pixels, not 4.

    ``eval_rows`` is the number of training images that the logged J and plain loss are computed on
    (0: all): a fixed random subset, the same for every method and seed, evaluated in mini-batches
    of the training batch size.
    """

    defaults: ClassVar[dict[str, Any]] = {
        "data": "cifar-10",
        "network": "resnet-20",
        "activation": "relu",
        "layout": "contiguous",
        "batch": 128,
        "weight_decay": 1e-4,
        "rows": 0,
        "test_rows": 0,
        "normalisation": "channel",
        "augmentation": "none",
        "masks": "same",
        "statistics": "both",
        "precision": "float32",
        "size": 32,
        "eval_rows": 0,
    }
    choices: ClassVar[dict[str, tuple[Any, ...]]] = {
        "size": (32, 16),
        "data": tuple(SETS),
        "network": tuple(NETWORKS),
        "activation": tuple(ACTIVATIONS),
        "layout": ("contiguous", "channels_last"),
        "normalisation": ("channel", "none"),
        "augmentation": ("none", "standard"),
        "masks": ("same", "fresh"),
        "statistics": ("both", "first"),
        "precision": ("float32", "bfloat16"),
    }
    description: ClassVar[str] = "images classified by a network (Figures 4 to 6)"

    def __init__(self, options: dict[str, Any], seed: int, device: torch.device) -> None:
        options = {**Images.defaults, **options}
        if wrong := self.conflict(options):
            key, why = wrong
            raise ValueError(f"{key} = {options[key]!r}: {why}")
        self.options, self.device = options, device
        images = load(options["data"])
        channels_last = options["layout"] == "channels_last"
        kept = _subset(len(images.train), options, "rows")
        kept_test = _subset(len(images.test), options, "test_rows")
        train, test, pad = images.train[kept], images.test[kept_test], PAD
        if options["size"] == 16:
            train, test, pad = halved(train), halved(test), PAD // 2
        standard = train if options["normalisation"] == "channel" else None
        self.train = Batches(train, images.train_labels[kept], device, channels_last, standard, pad)
        self.test = Batches(test, images.test_labels[kept_test], device, channels_last, standard, pad)
        self._logged = _chosen(len(train), options)
        self.weight_decay = options["weight_decay"]
        self.same_noise = options["masks"] == "same"
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed("initial point", options["data"], self._network_name(), options["activation"], seed))
            model = self._network()
        model.to(device)
        if channels_last:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._train(model)
        self._frozen = ExitStack()
        parts = [options["data"], options["rows"], options["batch"], seed]
        self.stream = Stream(len(train), options["batch"], reshuffled=True, seed_parts=parts)
        self._changes = torch.Generator().manual_seed(derive_seed("augmentation", *parts))
        self._ready: tuple[Tensor, Tensor, Tensor] | None = None

    @staticmethod
    def rows_of(options: dict[str, Any]) -> int:
        rows: int = options["rows"] or SETS[options["data"]].train_rows
        return rows

    @staticmethod
    def conflict(options: dict[str, Any]) -> tuple[str, str] | None:
        if options.get("size", 32) != 16:
            return None
        if options["network"] in ONLY_32:
            return "size", f"network {options['network']} takes images of 32x32 pixels only"
        if options["data"] == "mnist":
            return "size", "only the 32x32 images of CIFAR can be made 16x16, and mnist has 28x28"
        return None

    # ------------------------------------------------------------------------------------------ what is minimised

    def _network_name(self) -> str:
        return str(self.options["network"])

    def _network(self) -> nn.Module:
        options = self.options
        return NETWORKS[options["network"]](SETS[options["data"]].classes, ACTIVATIONS[options["activation"]])

    def _criterion(self, output: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, y)

    def draw(self) -> Tensor:
        """The rows and, with augmentation, what is done to each image: shift down, shift right, flip."""
        rows = self.stream.next()
        if self.options["augmentation"] == "none":
            return rows
        shifts = torch.randint(0, 2 * self.train.pad + 1, (len(rows), 2), generator=self._changes)
        flips = torch.randint(0, 2, (len(rows), 1), generator=self._changes)
        return torch.cat((rows[:, None], shifts, flips), 1)

    def loss(self, batch: Batch) -> Tensor:
        x, y = self.inputs(batch)
        with self._autocast():
            return self._criterion(self.replica(x), x, y)

    def inputs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The images of a mini-batch, made once for both passes over it."""
        if batch is None:
            return self.train.rows(torch.arange(len(self.train)))
        if self._ready is None or self._ready[0] is not batch:
            x, y = self.train.rows(batch) if batch.dim() == 1 else self.train.augmented(*batch.T)
            self._ready = batch, x, y
        return self._ready[1:]

    def second_pass(self, second: bool) -> None:
        self._frozen.close()
        if second and self.options["statistics"] == "first":
            self._frozen.enter_context(frozen_statistics(self.model))

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.options["precision"] == "bfloat16")

    # ------------------------------------------------------------------------------------------ what is logged

    @property
    def evaluated(self) -> int:
        return len(self._logged) + len(self.test)

    def evaluate(self) -> dict[str, float]:
        with as_trained(self.model, self.device), self._autocast():
            train = self._over(self.train, self._logged)
            squares = torch.stack([p.square().sum() for p in self.parameters])
        self.ranks.same(self.model.buffers())  # every rank has BatchNorm statistics of its own until the next forward pass
        with as_used(self.model), self._autocast():
            test = self._over(self.test, torch.arange(len(self.test)))
        penalty = self.weight_decay / 2 * squares.cpu().double().sum().item()
        return {"loss": train["loss"] + penalty, "plain loss": train["loss"], "test loss": test.pop("loss"), **test}

    def _over(self, images: Batches, which: Tensor) -> dict[str, float]:
        """The means over these images."""

        def measured(rows: Tensor) -> dict[str, Tensor]:
            x, y = images.rows(rows)
            return self._measured(self.model(x), x, y)

        return self._means(which, measured)

    def _measured(self, output: Tensor, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        right = (output.argmax(1) == y).float().mean()
        return {"loss": self._criterion(output, x, y), "accuracy": right}

    # ------------------------------------------------------------------------------------------ resuming

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"changes": self._changes.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._changes.set_state(state["changes"])


def _subset(there: int, options: dict[str, Any], key: str) -> Tensor | slice:
    """All, or a fixed choice that is the same for every method and seed."""
    data, wanted = options["data"], options[key]
    if not wanted:
        return slice(None)
    if wanted > there:
        raise DataError(f"{key} = {wanted}: {data} has {there} such images; 0 means all of them")
    generator = torch.Generator().manual_seed(derive_seed("subset", "train" if key == "rows" else "test", data))
    return torch.randperm(there, generator=generator)[:wanted]


def _chosen(there: int, options: dict[str, Any]) -> Tensor:
    """The training images that the logged J is computed on: all, or a fixed choice."""
    wanted = options["eval_rows"]
    if not wanted:
        return torch.arange(there)
    if wanted > there:
        raise DataError(f"eval_rows = {wanted}: there are {there} training images; 0 means all of them")
    generator = torch.Generator().manual_seed(derive_seed("subset", "evaluation", options["data"]))
    return torch.randperm(there, generator=generator)[:wanted]
