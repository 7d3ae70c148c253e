"""CIFAR-10, CIFAR-100 and MNIST: fetched from the net, checked, read into memory."""

from steptuned.lab.data.fetching import fetch
from steptuned.lab.data.reading import Images, folder, load
from steptuned.lab.data.sets import SETS, DataError, DataSet

__all__ = ["SETS", "DataError", "DataSet", "Images", "fetch", "folder", "load"]
