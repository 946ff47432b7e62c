"""States that earlier releases saved, in tests/released, go on exactly.

`python -m tests.loader.test_released_states` writes the one of this release.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from streampack import IterablePackedDataset, Mix, PackedDataLoader, __version__
from streampack.streaming.run_state import sealed, state_of, unsealed

FOLDER = Path(__file__).resolve().parents[1] / "released"
FILES = sorted(FOLDER.glob("*.json"))


def loader() -> PackedDataLoader:
    """A mixture in shuffle and balance windows, with cut samples: all that a state can hold."""
    sources = [
        {
            "name": name,
            "weight": weight,
            "source": [{"input_ids": [first + i] * (3 + i * step % 23)} for i in range(80)],
        }
        for name, weight, first, step in (("a", 2, 100, 7), ("b", 1, 300, 11))
    ]
    packs = IterablePackedDataset(
        Mix(sources),
        max_seq_len=32,
        split_across_pack=True,
        shuffle=16,
        num_lanes=4,
        balance_window=4,
        seed=3,
    )
    return PackedDataLoader(packs, batch_size=4)


def written() -> dict[str, Any]:
    """A state in the middle of an epoch, and what the next batches hold."""
    first = loader()
    batches = iter(first)
    for _ in range(7):
        next(batches)
    state = first.state_dict()
    return {"release": __version__, "state": state, "next": [next(batches).tokens.tolist() for _ in range(5)]}


def test_there_is_a_state_of_this_release() -> None:
    assert [*FILES], "python -m tests.loader.test_released_states writes one"
    minor = __version__.rpartition(".")[0]
    assert any(path.stem.startswith(f"{minor}.") for path in FILES)


def test_a_state_whose_lanes_have_other_names_is_refused() -> None:
    """Such a lane must not look as if it had not begun: it would repeat its epoch."""
    state = written()["state"]
    lanes = {}
    for lane, each in state.pop("lanes").items():
        values = unsealed(each, of=f"lane {lane}")
        lanes[lane] = sealed({"stand": values.pop("reader"), **values}, of=f"lane {lane}")
    head = {name: value for name, value in state.items() if name not in ("version", "sums", "checksum")}
    with pytest.raises(
        ValueError, match="a lane of this state has 'stand', which this version of streampack does"
    ):
        loader().load_state_dict(state_of(head, lanes))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_state_of_a_release_goes_on_exactly(path: Path) -> None:
    kept = json.loads(path.read_text())
    resumed = loader()
    resumed.load_state_dict(kept["state"])
    batches = iter(resumed)
    assert [next(batches).tokens.tolist() for _ in kept["next"]] == kept["next"]


if __name__ == "__main__":
    (FOLDER / f"{__version__}.json").write_text(json.dumps(written(), sort_keys=True) + "\n")
