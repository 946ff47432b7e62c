"""Training speed on one GPU: padding, stock packing and ours, beside the ceiling. ``python -m benchmarks.gpu``."""
