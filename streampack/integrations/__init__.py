"""Adapters to training frameworks that bring their own loop."""
