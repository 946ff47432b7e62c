"""Ranks: collectives that keep them in step, which ones share batches, checks that all have one run and one corpus."""

from streampack.distributed.rank_sync import RankSync

__all__ = ["RankSync"]
