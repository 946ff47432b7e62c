"""Names of devices in a config: whether torch trains on such a one, and whether this machine has it."""

from __future__ import annotations

import difflib

import torch

TRAINABLE = ("cpu", "cuda", "xpu", "mps")
OTHER_NAMES = {"gpu": "cuda", "nvidia": "cuda", "amd": "cuda", "rocm": "cuda", "hip": "cuda", "metal": "mps"}


def named_device(name: str) -> torch.device:
    """Return torch's device of this name, which need not be on this machine.

    >>> named_device("cuda:1").index
    1

    Raises:
        ValueError: for a name that torch does not know, or a type of device that it cannot train on.
    """
    try:
        device = torch.device(name)
        getattr(torch, device.type).is_available  # noqa: B018 - of some types there are names and nothing else
    except (RuntimeError, AttributeError) as error:
        kind, _, number = name.partition(":")
        close = OTHER_NAMES.get(kind.lower()) or next(
            iter(difflib.get_close_matches(kind.lower(), TRAINABLE, n=1)), None
        )
        hint = "set auto, cpu or cuda"
        if kind not in TRAINABLE and close:
            hint += f" (did you mean {f'{close}:{number}' if number else close}?)"
        raise ValueError(
            f"device={name!r} is none that torch {torch.__version__} can train on; {hint}"
        ) from error
    return device


def missing_device(device: torch.device) -> str | None:
    """Say that this machine does not have a device; None if it has."""
    if device.type == "cpu" or getattr(torch, device.type).is_available():
        return None
    return f"torch {torch.__version__} finds no {device.type} device on this machine"
