"""The long forms of the reliability tests: real processes, signals and collectives. ``python -m stress --list``."""
