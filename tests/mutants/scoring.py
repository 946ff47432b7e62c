"""Mutants of scoring."""
