"""The laboratory: runs the paper's experiments, defined in TOML, and compares the results.

Runs can be killed at any moment and resumed. Needs the extra `lab`.
"""
