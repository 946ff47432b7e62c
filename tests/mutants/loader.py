"""Mutants of loader."""
