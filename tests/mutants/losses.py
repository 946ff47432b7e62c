"""Mutants of losses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from streampack import losses
from tests.mutants.registry import mutant, patch_function


@mutant
def samples_weighed_by_pack() -> None:
    """With ``loss_norm="sample"``, a sample that is split over packs weighs 1 in each of them."""

    def make(good: Any) -> Any:
        def label_weights(batch: Any, *, loss_norm: str) -> Any:
            whole = [[f._replace(trained=None) for f in fragments] for fragments in batch.fragments]
            return good(replace(batch, fragments=whole), loss_norm=loss_norm)

        return label_weights

    patch_function(losses.label_weights, make)
