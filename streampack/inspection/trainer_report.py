"""The page of a training of transformers' `Trainer`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from streampack.inspection.packs import first_packs
from streampack.inspection.report_writer import PACKS, REPORT_FILE, write_run_page
from streampack.integrations.hf_trainer.hooks import hooks_of
from streampack.streaming.epoch_rows import tolerant

if TYPE_CHECKING:
    from transformers import Trainer


def write_trainer_report(trainer: Trainer) -> Path:
    """Write the page of a training that is over, ``report.html`` in the trainer's ``output_dir``; return its path.

    Every rank may call it; rank 0 writes. The first packs are made once more, from the run's data.

    Args:
        trainer: prepared by `prepare_trainer_for_packing`, and trained.

    Raises:
        ValueError: for any other trainer.
    """
    hooks, args = hooks_of(trainer), trainer.args
    if hooks is None or hooks.steps is None or hooks.ledger is None:
        raise ValueError(
            "the trainer has trained no packs to the end; call prepare_trainer_for_packing(trainer) and "
            "trainer.train() first"
        )
    path = Path(args.output_dir, REPORT_FILE)
    if not trainer.is_world_process_zero():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    loader, config = hooks.steps.loader, hooks.packs.lane_config
    window, num_lanes = hooks.packs.window_for(args.world_size), hooks.packs.lanes_for(args.world_size)
    metrics: dict[int, dict[str, float]] = {}
    for entry in trainer.state.log_history:
        found = {name: float(each) for name, each in entry.items() if isinstance(each, (int, float))}
        metrics.setdefault(entry["step"], {}).update(found)
    packs = first_packs(replace(tolerant(config), balance_window=window), num_lanes, PACKS)
    write_run_page(
        path,
        ended=f"finished after {trainer.state.global_step:,} steps",
        in_effect={
            "data": f"{num_lanes} lane(s) for {args.world_size} rank(s), {loader.packs_per_step} pack(s) a step",
            "packing": f"{config.packing.filled_by}, max_seq_len={config.packing.max_seq_len}, "
            f"balance_window={window}",
            "attention": hooks.inputs.attention,
        },
        settings=args.to_json_string(),
        metrics=metrics,
        ledger=hooks.ledger.as_dict(),
        packs=[((pack.number * num_lanes + pack.lane) // loader.packs_per_step + 1, pack) for pack in packs],
    )
    return path
