"""Evaluation in packs: log-likelihoods of many sequences."""

from streampack.scoring.score import Score, score

__all__ = ["Score", "score"]
