"""Ranks: what a process is one of, collectives that keep ranks in step, and checks that all read one corpus."""

from streampack.distributed.rank_sync import RankSync

__all__ = ["RankSync"]
