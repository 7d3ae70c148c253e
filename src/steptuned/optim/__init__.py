"""The algorithms of the paper, one a file."""
