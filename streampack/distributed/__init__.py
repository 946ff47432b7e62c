"""Ranks: what a process is one of, collectives that keep ranks in step, and checks that all read one corpus."""

from streampack.distributed.rank_sync import Lockstep

__all__ = ["Lockstep"]
