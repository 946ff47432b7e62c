import pytest

from tests.harness.runs import Run, whole_run


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that is over, for tests that look at it, and for those that go on from a copy."""
    return whole_run(tmp_path_factory)
