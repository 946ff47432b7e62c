"""Token shards by a Ray cluster of several nodes on this machine: the same bytes, whatever dies.

``make test-ray`` runs it; Ray is no part of the environment of the other tests.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streampack import JSONLSource
from tests.harness.tokenizing import Logged, content, corpus, run

ray = pytest.importorskip("ray", reason="needs Ray: make test-ray")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A head node without CPUs for tasks, where this process is."""
    from ray.cluster_utils import Cluster

    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    yield found
    ray.shutdown()
    found.shutdown()


def on_ray(cluster: Any, source: Any, out: Path, log: Path, *, seconds: float = 0.0) -> Path:
    encoder = Logged(log, seconds=seconds)
    return run(source, out, encoder=encoder, lanes=12, engine="ray", address=cluster.address)


def expected(source: JSONLSource, folder: Path) -> dict[str, bytes]:
    return content(run(source, folder / "local", encoder=Logged(folder / "log"), lanes=12))


def test_a_local_cluster_makes_the_same_bytes(tmp_path: Path) -> None:
    source = corpus(tmp_path / "corpus")
    out = run(source, tmp_path / "ray", encoder=Logged(tmp_path / "log"), lanes=12, engine="ray")
    assert not ray.is_initialized()
    assert content(out) == expected(source, tmp_path)


def test_a_node_dies_in_the_middle(cluster: Any, tmp_path: Path) -> None:
    source = corpus(tmp_path / "corpus")
    wanted = expected(source, tmp_path)
    nodes = [cluster.add_node(num_cpus=2) for _ in range(2)]
    cluster.wait_for_nodes()
    out, log, killed = tmp_path / "ray", tmp_path / "rows", []

    def kill() -> None:
        while not log.exists() or log.read_text().count("\n") < 80:
            time.sleep(0.01)
        cluster.remove_node(nodes[0], allow_graceful=False)  # SIGKILL
        killed.append(log.read_text().count("\n"))

    thread = threading.Thread(target=kill)
    thread.start()
    on_ray(cluster, source, out, log, seconds=0.02)
    thread.join()
    assert killed[0] < 300, "it came in the middle"
    assert content(out) == wanted
    assert log.read_text().count("\n") > 300, "rows of the dead node were encoded again"


def test_errors_of_a_task_are_those_of_a_local_run(cluster: Any, tmp_path: Path) -> None:
    corpus(tmp_path / "corpus")
    (tmp_path / "corpus" / "1.jsonl").write_text('{"text": "good"}\n{"words": "bad"}\n')
    source = JSONLSource(str(tmp_path / "corpus" / "*.jsonl"))
    cluster.add_node(num_cpus=2)
    cluster.wait_for_nodes()
    with pytest.raises(ValueError, match="1.jsonl:2.*column 'text' is missing") as caught:
        on_ray(cluster, source, tmp_path / "ray", tmp_path / "rows")
    assert type(caught.value) is ValueError
