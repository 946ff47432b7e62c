"""Ranks: joining a process group, collectives that keep ranks in step, checks that all have the same run and corpus."""

from streampack.distributed.rank_sync import RankSync

__all__ = ["RankSync"]
