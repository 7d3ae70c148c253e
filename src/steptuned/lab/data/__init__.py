"""CIFAR-10, CIFAR-100 and MNIST: downloaded, verified and read into memory."""
