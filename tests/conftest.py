import gc
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.harness.models_table import file_record

# Configs of tests name components of tests, in the processes that tests start, too.
os.environ.setdefault("STREAMPACK_TRUST", "tests")

gc.disable()  # until all is imported: none of it can be freed

# A machine lent for the GPU tests may have a bare pytest; the property tests are not among those.
try:
    from hypothesis import settings
except ImportError:
    pass
else:
    # The same examples on every run, so that a red CI is a change's doing; new ones are looked for with
    # `--hypothesis-profile=explore`. No deadline: a first call pays for imports, and a CI machine is slow at times.
    settings.register_profile("fixed", derandomize=True, deadline=None)
    settings.register_profile("explore", deadline=None, max_examples=1000)
    settings.load_profile("fixed")


def pytest_configure(config: pytest.Config) -> None:
    """Let ``-v`` say how many cases each property test drew: Hypothesis's here, ours in the summary."""
    if config.option.verbose > 0:
        config.option.hypothesis_show_statistics = True


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for report in terminalreporter.getreports("passed") if terminalreporter.verbosity > 0 else ():
        for name, value in report.user_properties:
            if name == "drew":
                terminalreporter.write_line(f"{report.nodeid} drew {value}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_tests:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_tests:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """Leave what was imported out of garbage collections: accelerate makes a whole one at each end of a training."""
    gc.collect()
    gc.freeze()
    gc.enable()
    gc.set_threshold(10_000, 20, 50)
    if loader := sys.modules.get("torch.utils.data._utils"):
        # torch waits so many seconds (5.0) for the workers of an iterator that the garbage collector frees, as it does
        # after an error: their queues may be gone by then, so that they do not hear of the end. The wait falls into
        # any later test.
        loader.MP_STATUS_CHECK_INTERVAL = 0.5
    # pytest hangs its handlers on each logger that does not propagate, six times a test: of torch, these are fifty.
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch.") and isinstance(logger, logging.Logger):
            logger.propagate = True
    if processes := sys.modules.get("tests.harness.processes"):
        processes.start_server()


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run of full_finetune that is over, for tests that look at it, and for those that go on from a copy."""
    from tests.harness.runs import whole_run

    return whole_run(tmp_path_factory)


@pytest.fixture(scope="session")
def record_model() -> Callable[[str, str, str, str], None]:
    """Files what a family of models did with a backend: ``record_model("torchtune", "gemma2", "dense", outcome)``.

    The outcome is what `tests.harness.models_table.figures` makes, or ``"refused: why"``.
    """
    return lambda *record: file_record(record)
