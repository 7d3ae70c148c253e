"""Step-Tuned SGD in training frameworks: one module each, which imports its framework and is imported by nobody else."""
