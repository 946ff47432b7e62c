"""Mutants of training."""
