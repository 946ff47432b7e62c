"""Mutants: how one is written, planted, and shown to have run.

A mutant stands in place of a documented function or method of streampack, so that it outlives changes of what lies
below. What becomes of it is written to the file that ``STREAMPACK_MUTANT_TRACE`` names, by every process it runs in
(forked ranks and workers inherit it): ``planted``, ``ran TEST``, or what is wrong with it.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

AREAS = (
    "attention",
    "encoders",
    "integrations",
    "loader",
    "losses",
    "map_style",
    "packing",
    "scoring",
    "sources",
    "storage",
    "streaming",
    "tokenize",
    "training",
)
HERE = Path(__file__).parent
MUTANTS: dict[str, Callable[[], None]] = {}

_planting = ""  # the mutant whose patches are being made
_only_noting = False  # whether patches note that they ran, and change nothing
_noted: set[tuple[str, str]] = set()


def mutant(plant: Callable[[], None]) -> Callable[[], None]:
    """Register a mutant by its function's name; its docstring says what is wrong then."""
    name = f"{plant.__module__.rpartition('.')[2]}.{plant.__name__}"
    assert name not in MUTANTS, f"two mutants are named {name}"
    MUTANTS[name] = plant
    return plant


def replaces(seam: Any, name: str | None = None) -> Callable[[Callable[..., Any]], Callable[[], None]]:
    """Register a function as a mutant: it stands in place of a seam, which it takes as its first argument.

    Args:
        seam: a function; a class or module, with ``name``; or text, ``module:function``, for what is only imported
            when the mutant is planted.
        name: what is replaced in the class or module, as for `replace`.
    """

    def register(bad: Callable[..., Any]) -> Callable[[], None]:
        @functools.wraps(bad)
        def plant() -> None:
            owner = pkgutil.resolve_name(seam) if isinstance(seam, str) else seam
            replace(owner, name, bad) if name else replace_function(owner, bad)

        return mutant(plant)

    return register


def load(*areas: str) -> dict[str, Callable[[], None]]:
    """Import the mutants of these areas; of all by default."""
    for area in areas or AREAS:
        importlib.import_module(f"tests.mutants.{area}")
    return MUTANTS


def plant(name: str) -> None:
    """Plant a mutant; the trace says that it is planted, or why it cannot be."""
    global _planting
    _planting = name
    try:
        area = name.partition(".")[0]
        if area in AREAS:  # a plugin of a test may have mutants of its own
            load(area)
        MUTANTS[name]()
    except BaseException as error:
        write_trace(f"cannot be planted: {type(error).__name__}: {error}".splitlines()[0])
        raise
    write_trace("planted")


def note_runs() -> None:
    """Plant all mutants without their faults: the trace then names which tests run which of them."""
    global _only_noting
    _only_noting = True
    for name in load():
        plant(name)


def replace(owner: Any, name: str, bad: Callable[..., Any]) -> None:
    """Replace a method or property of a class.

    Args:
        owner: the class, or a module whose own code looks the name up when it is called.
        name: an attribute that exists: a patch of a name that nobody uses would never be found.
        bad: takes the function that was there, and then that one's arguments.
    """
    good = inspect.getattr_static(owner, name)
    if isinstance(good, property):
        setattr(owner, name, property(_watched(good.fget, bad), good.fset))
    elif isinstance(good, staticmethod | classmethod):
        setattr(owner, name, type(good)(_watched(good.__func__, bad)))
    else:
        assert callable(good), f"{owner}.{name} is no function"
        setattr(owner, name, _watched(good, bad))


def replace_function(good: Callable[..., Any], bad: Callable[..., Any]) -> None:
    """Replace a function in every module of streampack that has it under whatever name."""
    good = inspect.unwrap(good)  # another mutant may have wrapped it
    places = [
        (module, name, value)
        for key, module in list(sys.modules.items())
        if key.partition(".")[0] == "streampack"
        for name, value in list(vars(module).items())
        if inspect.isfunction(value) and inspect.unwrap(value) is good
    ]
    assert places, f"no module of streampack has {good}"
    for module, name, value in places:
        setattr(module, name, _watched(value, bad))


def _watched(good: Any, bad: Callable[..., Any]) -> Callable[..., Any]:
    """Make the faulty function, and let the trace tell in which tests it runs and whether it breaks by itself."""
    mutant = _planting
    called = good if _only_noting else functools.partial(bad, good)

    @functools.wraps(good)
    def watched(*args: Any, **settings: Any) -> Any:
        # What is written below would break the graph, and tests count graphs.
        if torch.compiler.is_compiling():
            return called(*args, **settings)
        _note_run(mutant)
        try:
            return called(*args, **settings)
        except Exception as error:
            if not isinstance(error, StopIteration) and (broken := _broken_by_itself(error, bad)):
                write_trace(broken)
            raise

    # Warnings are shown at the first line outside of the package: the wrapper counts as the function that it wraps.
    code = inspect.unwrap(good).__code__
    watched.__code__ = watched.__code__.replace(co_filename=code.co_filename)
    return watched


def _broken_by_itself(error: Exception, bad: Callable[..., Any]) -> str | None:
    """Say what is wrong with a patch whose own code raised: it no longer fits streampack, so no check has seen it."""
    frames = [Path(frame.f_code.co_filename) for frame, _ in traceback.walk_tb(error.__traceback__)][1:]
    home = Path(bad.__code__.co_filename).parent
    ours = [number for number, path in enumerate(frames) if path.parent in {home, HERE}]
    # What the patch calls of streampack, or of a test's own class, may raise because of the fault.
    if _only_noting or any(
        set(path.parts) & {"streampack", "tests"} for path in frames[max(ours, default=-1) + 1 :]
    ):
        return None
    return f"broke by itself: {type(error).__name__}: {error}".splitlines()[0]


def _note_run(mutant: str) -> None:
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]  # "path::name (call)"
    if (mutant, test) not in _noted:
        _noted.add((mutant, test))
        write_trace(f"ran {mutant} {test}")


def write_trace(line: str) -> None:
    """Append a line to the trace; one short line, so that processes do not mix theirs."""
    if path := os.environ.get("STREAMPACK_MUTANT_TRACE"):
        with Path(path).open("a") as file:
            file.write(f"{line}\n")
