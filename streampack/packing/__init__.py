"""From rows to packs: encoders turn rows into samples, the planner groups them, the assembler fills arrays."""

from streampack.packing.batch import Batch, collate_packed
from streampack.packing.planner import plan_packs
from streampack.packing.settings import Packing

__all__ = ["Batch", "Packing", "collate_packed", "plan_packs"]
