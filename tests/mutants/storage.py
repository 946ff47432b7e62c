"""Mutants of storage."""
