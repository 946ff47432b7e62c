"""Mutants of encoders."""
