"""What is shown of a store: figures and tables."""
