"""Mini-batches from memory: images on the training device, standardised and augmented."""

import torch
from torch import Tensor

PAD = 4


def halved(images: Tensor) -> Tensor:
    """Images of half the height and width: means of 2x2 pixels, as float32 from 0 to 255.

    A mean of four bytes is a multiple of 1/4, which float32 represents exactly.
    """
    sums = sum(images[:, :, i::2, j::2].to(torch.int16) for i in (0, 1) for j in (0, 1))
    assert isinstance(sums, Tensor)
    return sums.to(torch.float32) / 4


class Batches:
    """Images and labels on a device. Mini-batches are float32, in the layout of the network.

    Images are bytes, or the result of :func:`halved`.
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        device: torch.device,
        channels_last: bool,
        standard: tuple[Tensor, Tensor] | None,
        pad: int = PAD,
    ) -> None:
        """``standard``: the mean and the deviation by which each channel is standardised.

        None: pixels are in [0, 1].
        """
        self.pad = pad
        self.labels = labels.to(device)
        self.channels_last = channels_last
        # A mini-batch is gathered by whole rows, in the order of the layout.
        stored = images.permute(0, 2, 3, 1) if channels_last else images
        self._shape = stored.shape[1:]
        self._stored = stored.reshape(len(images), -1).to(device)
        channels = images.shape[1]
        mean, deviation = standard or (torch.zeros(channels), torch.ones(channels))
        # One value per pixel: broadcasting one per channel would be several times slower.
        self._scale = self._per_pixel(1 / (255 * deviation)).to(device)
        self._shift = self._per_pixel(-mean / deviation).to(device)

    def _per_pixel(self, channels: Tensor) -> Tensor:
        """These values of the channels at every pixel of an image, in the order of the layout."""
        values = channels if self.channels_last else channels[:, None, None]
        return values.expand(self._shape).contiguous()

    def __len__(self) -> int:
        return len(self.labels)

    def rows(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        rows = rows.to(self.labels.device)
        return self._standardised(self._gathered(rows)), self.labels[rows]

    def augmented(
        self, rows: Tensor, down: Tensor, right: Tensor, flip: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Pad each image by ``pad`` black pixels, crop at (down, right), flip it if flip is 1.

        ``down`` and ``right`` are from 0 to 2 ``pad``.
        """
        device = self.labels.device
        rows, down, right, flip = (t.to(device) for t in (rows, down, right, flip))
        sides, height = (self.pad,) * 4, 1 if self.channels_last else 2
        padded = torch.nn.functional.pad(
            self._gathered(rows), (0, 0, *sides) if self.channels_last else sides
        )
        # Every crop is the same view of the padded images, starting at another place in memory.
        steps = padded.stride()
        images = torch.arange(len(rows), device=device)
        starts = images * steps[0] + down * steps[height] + right * steps[height + 1]
        end = sum((n - 1) * step for n, step in zip(self._shape, steps[1:], strict=True))
        views = padded.as_strided((padded.numel() - end, *self._shape), (1, *steps[1:]))
        cropped = views.index_select(0, starts)
        both = torch.cat((cropped, cropped.flip(height + 1)))
        chosen = both.index_select(0, images + len(rows) * flip)
        return self._standardised(chosen), self.labels[rows]

    def _gathered(self, rows: Tensor) -> Tensor:
        """These images in the order of the layout."""
        return self._stored.index_select(0, rows).view(-1, *self._shape)

    def _standardised(self, stored: Tensor) -> Tensor:
        """Standardise new copies of images, given in the order of the layout."""
        pixels = stored.to(torch.float32)
        torch.addcmul(self._shift, pixels, self._scale, out=pixels)
        return pixels.permute(0, 3, 1, 2) if self.channels_last else pixels


def mean_and_deviation(images: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of every channel, with pixels in [0, 1].

    They are exact, from the counts of each value: bytes have 256 values, means of four bytes 1021.
    """
    parts = 4 if images.is_floating_point() else 1
    values = torch.arange(255 * parts + 1, dtype=torch.float64) / (255 * parts)
    whole = (images * parts).to(torch.int16) if parts > 1 else images
    counts = torch.stack(
        [torch.bincount(c.reshape(-1), minlength=len(values)) for c in whole.unbind(1)]
    ).double()
    total = counts.sum(1)
    mean = counts @ values / total
    variance = counts @ values.square() / total - mean.square()
    return mean.float(), variance.sqrt().clamp(min=1e-6).float()
