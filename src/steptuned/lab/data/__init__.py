"""CIFAR-10, CIFAR-100 and MNIST: downloaded, checked and read into memory."""
