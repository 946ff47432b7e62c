"""Devices by name: which ones torch can train on, and which ones this machine has."""

from __future__ import annotations

import os

import torch


def pick_device(name: str) -> torch.device:
    """Return this rank's device; ``auto`` is a GPU where there is one.

    Raises:
        ValueError: for a device that this machine does not have. torchtune would silently use the CPU instead.
    """
    from torchtune import utils

    if name != "auto" and (problem := missing_device(named_device(name))):
        raise ValueError(
            f"device={name!r}: {problem}; check the driver and that torch was built for it, or set device=cpu or "
            "device=auto"
        )
    try:
        device: torch.device = utils.get_device(None if name == "auto" else name)
    except RuntimeError as error:  # there are more ranks than GPUs, or an index is given for several ranks
        raise ValueError(f"device={name!r}, local rank {os.environ.get('LOCAL_RANK', 0)}: {error}") from error
    return device


def named_device(name: str) -> torch.device:
    """Return torch's device of a name, whether or not this machine has it.

    >>> named_device("cuda:1").index
    1

    Raises:
        ValueError: for a name that torch does not know, or a type of device that it cannot train on.
    """
    try:
        device = torch.device(name)
        getattr(torch, device.type).is_available  # noqa: B018 - some types have a name and nothing else
    except (RuntimeError, AttributeError) as error:
        raise ValueError(
            f"device={name!r} is none that torch {torch.__version__} can train on; set auto, cpu or cuda"
        ) from error
    return device


def missing_device(device: torch.device) -> str | None:
    """Return a message if this machine does not have a device, else None."""
    if device.type == "cpu" or getattr(torch, device.type).is_available():
        return None
    return f"torch {torch.__version__} finds no {device.type} device on this machine"
