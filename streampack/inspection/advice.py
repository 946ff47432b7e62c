"""Recommendations from the figures of a report, with the lines of YAML for each."""

from __future__ import annotations

from collections.abc import Callable

from streampack.inspection.report import Advice, Outcome, Report
from streampack.packing.groups import ROOT
from streampack.packing.strategies import STRATEGIES

WORTH = 0.01
"""A change is recommended from this difference in padding, lost tokens or waiting on: one hundredth."""
FEW_STEPS = 100
ROUND = 1024


def advise(report: Report) -> list[Advice]:
    """Return what to change, the most important first; an empty list if nothing is worth it."""
    rules: tuple[Callable[[Report], Advice | None], ...] = (
        _bad,
        _overlong,
        _truncated,
        _untrained,
        _strategy,
        _lanes,
        _null_packs,
        _balance,
        _steps,
    )
    return [advice for rule in rules if (advice := rule(report)) is not None]


def _bad(report: Report) -> Advice | None:
    loss = next((loss for loss in report.losses if loss.reason == "bad" and loss.stops), None)
    if loss is None:
        return None
    return Advice(
        "Mend or skip the rows that cannot be read or encoded",
        f"the run stops at the first of {loss.rows:,}: {loss.examples[0]}",
        "data:\n  skip_bad: True  # lists them in output_dir",
    )


def _overlong(report: Report) -> Advice | None:
    loss = next((loss for loss in report.losses if loss.reason == "overlong" and loss.stops), None)
    if loss is None:
        return None
    fits = _enough_for(report, 1.0)
    most = report.settings.max_seq_len
    way = "truncate  # or drop; split keeps every token" if report.lengths.masked else "split"
    if _has_groups(report):
        way = "truncate  # or drop"
    raised = f"\n  # or keep them whole: max_seq_len: {fits}" if fits <= 4 * most else ""
    return Advice(
        "Say what to do with samples longer than max_seq_len",
        f"{loss.rows:,} rows ({loss.fraction:.1%} of the tokens) are longer than {most:,}, and the run stops at the "
        "first of them",
        f"data:\n  overlong: {way}{raised}",
    )


def _truncated(report: Report) -> Advice | None:
    lost = [loss for loss in report.losses if loss.reason in ("truncated", "overlong") and not loss.stops]
    fraction, most = sum(loss.fraction for loss in lost), report.settings.max_seq_len
    if fraction < WORTH:
        return None
    longer = _enough_for(report, 0.999)
    why = f"overlong: {report.settings.overlong} loses {fraction:.1%} of the tokens"
    if most < longer <= 4 * most:
        return Advice(
            "Raise max_seq_len",
            f"{why}; {longer:,} holds 99.9 % of the rows",
            f"data:\n  max_seq_len: {longer}  # if the model has so many positions",
        )
    if _has_groups(report):
        return None
    return Advice("Keep long samples in pieces", why, "data:\n  overlong: split")


def _has_groups(report: Report) -> bool:
    """Return whether some of the packs have groups with a shared prefix, which cannot be split."""
    return any(sequence.parent != ROOT for pack in report.packs for sequence in pack.sequences)


def _enough_for(report: Report, quantile: float) -> int:
    """Return a round ``max_seq_len`` that holds this fraction of the rows."""
    return -(-report.lengths.quantiles[str(quantile)] // ROUND) * ROUND


def _untrained(report: Report) -> Advice | None:
    loss = next((loss for loss in report.losses if loss.reason == "untrained" and not loss.tokens), None)
    if loss is None or loss.rows < WORTH * report.coverage.rows:
        return None
    return Advice(
        "Leave out samples that train nothing",
        f"{loss.rows:,} rows ({loss.rows / report.coverage.rows:.1%}) have no trained token, such as "
        f"{loss.examples[0]}",
        "data:\n  untrained: drop",
    )


def _strategy(report: Report) -> Advice | None:
    chosen = report.chosen
    others = [outcome for outcome in report.outcomes if outcome.name in STRATEGIES]
    # Of strategies that differ in less than a tenth of a per cent, exact_fit, which is the default.
    best: Outcome = min(others, key=lambda each: (round(each.padding, 3), each.name != "exact_fit"))
    if chosen.padding - best.padding < WORTH or chosen.name == "split_across_pack":
        return None
    return Advice(
        f"Pack by {best.name}",
        f"it pads {best.padding:.1%} of the tokens and {chosen.name} {chosen.padding:.1%}: "
        f"{chosen.tokens / best.tokens:.2f} times as many tokens would be computed",
        f"data:\n  strategy: {best.name}",
    )


def _lanes(report: Report) -> Advice | None:
    chosen, settings = report.chosen, report.settings
    consumers = settings.ranks * max(1, settings.workers)
    if settings.lanes < consumers:
        return Advice(
            "Give every consumer a lane",
            f"num_lanes={settings.lanes} is less than {consumers} (ranks x workers), and a new run is refused",
            f"data:\n  num_lanes: {consumers}",
        )
    if chosen.last_packs < WORTH or settings.lanes <= consumers:
        return None
    return Advice(
        "Use fewer lanes",
        f"{chosen.last_packs:.1%} of all tokens is padding in the last packs of {settings.lanes} lanes, each of which "
        "ends part-empty",
        f"data:\n  num_lanes: {consumers}  # ranks x workers; a resume on more ranks needs more lanes",
    )


def _null_packs(report: Report) -> Advice | None:
    settings = report.settings
    at_once = settings.ranks * settings.batch_size
    rest = settings.packs_per_step % at_once
    if not rest or settings.packs_per_step < settings.ranks:
        return None
    rounded = -(-settings.packs_per_step // at_once) * at_once
    return Advice(
        "Let ranks and batches divide the packs of a step",
        f"packs_per_step={settings.packs_per_step} is no multiple of {at_once} (ranks x batch_size), so batches are "
        "uneven or filled up with null packs",
        f"packs_per_step: {rounded}",
    )


def _balance(report: Report) -> Advice | None:
    each = next((i for i in report.attention.imbalance if i.ranks == report.settings.ranks), None)
    if each is None or report.settings.balance_window:
        return None
    if each.planned - each.balanced < WORTH:
        return None
    return Advice(
        "Hand packs out by attention cost",
        f"the slowest of {each.ranks} ranks has {each.planned:.2f} times the work of the mean, with a window "
        f"{each.balanced:.2f}",
        f"data:\n  balance_window: {each.window}",
    )


def _steps(report: Report) -> Advice | None:
    chosen = report.chosen
    padding = next(outcome for outcome in report.outcomes if outcome.name == "padding")
    if report.coverage.rows_in_all is None or chosen.steps >= FEW_STEPS or padding.steps < 2 * chosen.steps:
        return None
    return Advice(
        "Mind the number of optimizer steps",
        f"an epoch is {chosen.steps:,.0f} steps of about {chosen.samples_per_step:,.0f} samples, and was "
        f"{padding.steps:,.0f} of {padding.samples_per_step:,.0f} with padding: train more epochs, or set the learning "
        "rate for the larger steps",
        f"packs_per_step: {report.settings.ranks}  # the fewest; or more epochs",
    )
