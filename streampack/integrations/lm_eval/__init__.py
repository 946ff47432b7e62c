"""A model class for lm-evaluation-harness that computes its requests in packs; importing it registers it."""

from streampack.integrations.lm_eval.model import PackedLM

__all__ = ["PackedLM"]
