"""The laboratory: the paper's experiments, defined in TOML, run so that they can be killed, and compared. Needs the extra `lab`."""
