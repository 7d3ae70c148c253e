"""Step-Tuned SGD in training frameworks: one module per framework, which only you import."""
