"""What large runs cost: measured here at two sizes and worked out, and simulated. ``python -m benchmarks.scale``."""
