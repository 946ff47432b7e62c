"""Training speed on one GPU with padding and with packing, beside the ceiling: ``python -m benchmarks.gpu``."""
