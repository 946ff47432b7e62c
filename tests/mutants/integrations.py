"""Mutants of integrations."""
