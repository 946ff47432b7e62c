from collections.abc import Iterator

import pytest

from tests.harness.stores import Web


@pytest.fixture
def web() -> Iterator[Web]:
    with Web({}) as server:
        yield server
