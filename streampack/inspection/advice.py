"""Recommendations from the figures of a report, each with its lines of YAML."""

from __future__ import annotations

from collections.abc import Iterator

from streampack.inspection.report import Advice, Report
from streampack.packing.groups import ROOT
from streampack.packing.strategies import STRATEGIES

WORTH = 0.01
"""The least difference in padding or lost tokens for which a change is recommended."""
MANY = 0.1
"""The fraction of bad rows above which skipping them is not recommended."""
ROUND = 1024


def advise(report: Report) -> list[Advice]:
    """Return what to change, the most important first."""
    return [*_of_rows(report), *_of_packs(report)]


def _of_rows(report: Report) -> Iterator[Advice]:
    packing = report.settings.packing
    most, losses = packing.max_seq_len, {loss.reason: loss for loss in report.losses}
    # Groups with a shared prefix cannot be split.
    groups = any(sequence.parent != ROOT for pack in report.packs for sequence in pack.sequences)
    if (bad := losses.get("bad")) and bad.stops:
        lost, skip = bad.rows / report.coverage.rows, "skip_bad: True  # lists them in output_dir"
        mend = "encoder: {_component_: my_module.my_encoder}  # a function that may mend the row"
        yield Advice(
            f"Mend {'or skip ' * (lost < MANY)}the rows that cannot be read or encoded",
            f"the run stops at the first of {bad.rows:,}, {lost:.1%} of the rows: {bad.examples[0]}",
            f"data:\n  {skip if lost < MANY else mend}",
        )
    overlong = losses.get("overlong")
    if overlong and overlong.stops:
        fits, masked = _enough_for(report, 1.0), report.lengths.tokens > report.lengths.trained
        way = "truncate  # or drop" if groups or masked else "split"
        way += "; split keeps every token" if masked and not groups else ""
        raised = f"\n  # or keep them whole: max_seq_len: {fits}" if fits <= 4 * most else ""
        yield Advice(
            "Say what to do with samples longer than max_seq_len",
            f"{overlong.rows:,} rows ({overlong.fraction:.1%} of the tokens) are longer than {most:,}, and the run "
            "stops at the first of them",
            f"data:\n  overlong: {way}{raised}",
        )
    cut = [loss for loss in (overlong, losses.get("truncated")) if loss and not loss.stops]
    if (fraction := sum(loss.fraction for loss in cut)) >= WORTH:
        longer = _enough_for(report, 0.999)
        why = f"overlong: {packing.overlong} loses {fraction:.1%} of the tokens"
        if most < longer <= 4 * most:
            yield Advice(
                "Raise max_seq_len",
                f"{why}; {longer:,} holds 99.9 % of the rows",
                f"data:\n  max_seq_len: {longer}  # if the model has as many positions",
            )
        elif not groups:
            yield Advice("Keep long samples in pieces", why, "data:\n  overlong: split")


def _enough_for(report: Report, quantile: float) -> int:
    """Return a round ``max_seq_len`` that holds this fraction of the rows."""
    return -(-report.lengths.quantiles[str(quantile)] // ROUND) * ROUND


def _of_packs(report: Report) -> Iterator[Advice]:
    chosen, settings = report.chosen, report.settings
    ranks = settings.shape.ranks
    consumers = ranks * max(1, settings.shape.workers)
    # Among strategies that differ by less than 0.1 %, exact_fit, which is the default.
    best = min(
        (outcome for outcome in report.outcomes if outcome.name in STRATEGIES),
        key=lambda each: (round(each.padding, 3), each.name != "exact_fit"),
    )
    if chosen.padding - best.padding >= WORTH and chosen.name != "split_across_pack":
        yield Advice(
            f"Pack by {best.name}",
            f"it pads {best.padding:.1%} of the tokens and {chosen.name} {chosen.padding:.1%}: "
            f"{chosen.tokens / best.tokens:.2f}x as many tokens are computed",
            f"data:\n  strategy: {best.name}",
        )
    if settings.lanes < ranks:
        yield Advice(
            "Give every rank and worker a lane",
            f"num_lanes={settings.lanes} is less than {ranks} ranks, and a new run is refused",
            f"data:\n  num_lanes: {consumers}",
        )
    elif chosen.last_packs >= WORTH and settings.lanes > consumers:
        yield Advice(
            "Use fewer lanes",
            f"{chosen.last_packs:.1%} of all tokens is padding in the last packs of {settings.lanes} lanes, which are "
            "part-empty",
            f"data:\n  num_lanes: {consumers}  # ranks x workers; a resume on more ranks needs more lanes",
        )
