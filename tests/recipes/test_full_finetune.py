"""The recipe on a toy model: losses, resume, refused configs."""

import gzip
import shutil
import time

import pytest
import torch
from streampack_recipes.full_finetune import train

from streampack.training.overrides import with_overrides
from tests.support.ranks import start_process
from tests.support.tiny import losses, numbers, tiny_config, write_rows


def test_a_run_learns_and_accounts_for_every_token(tmp_path, capsys):
    result = train(tiny_config(tmp_path, max_steps=30))
    (first, before), (last, after) = result["held_out"][0], result["held_out"][-1]
    assert (first, last) == (0, 30)
    assert after < before - 0.5
    ledger = result["ledger"]
    assert ledger.tokens_in == ledger.packed + ledger.buffered + sum(ledger.dropped.values())
    assert ledger.packed == result["tokens"]
    assert ledger.packs == 30 * 4
    out = capsys.readouterr().out
    for words in ("packs ", "in = ", "tokens/s", "held-out", "weights"):
        assert words in out
    weights = torch.load(next((tmp_path / "out" / "epoch_0").glob("*.bin")), weights_only=True)
    start = torch.load(tmp_path / "init" / "model.bin", weights_only=True)
    assert weights.keys() == start.keys()
    assert any(not torch.equal(weights[key], start[key]) for key in start)
    assert len(losses(tmp_path)) == 30
    assert "nan" not in (tmp_path / "out" / "logs" / "log.txt").read_text()


def test_a_run_by_epochs_ends_with_the_data(tmp_path):
    result = train(tiny_config(tmp_path, rows=100, max_steps=None, epochs=3, validation=None))
    assert result["ledger"].samples == 300
    assert result["ledger"].buffered == 0
    assert result["held_out"] == []


def test_a_schedule_can_be_removed_by_one_word(tmp_path):
    result = train(with_overrides(tiny_config(tmp_path, max_steps=2, validation=None), ["~lr_scheduler"]))
    assert result["step"] == 2
    assert set(losses(tmp_path, "lr").values()) == {"0.02"}


@pytest.mark.slow
# torch's own remarks: of its trace's events, and of a cycle of which nothing is kept.
@pytest.mark.filterwarnings("ignore::UserWarning:torch.*")
def test_the_profiler_traces_the_steps(tmp_path):
    node = {
        "_component_": "torchtune.training.setup_torch_profiler", "enabled": True, "cpu": True, "cuda": False,
        "output_dir": str(tmp_path / "profile"), "profile_memory": False, "with_stack": False,
        "record_shapes": False, "with_flops": False, "wait_steps": 1, "warmup_steps": 1, "active_steps": 2,
        "num_cycles": 1,
    }  # fmt: skip
    train(tiny_config(tmp_path, max_steps=6, validation=None, profiler=node))
    [trace] = (tmp_path / "profile").rglob("*trace.json*")
    data = gzip.decompress(trace.read_bytes()) if trace.suffix == ".gz" else trace.read_bytes()
    assert data.count(b'"ProfilerStep#') >= 2


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    train(tiny_config(folder))
    return losses(folder), losses(folder, "validation_loss")


@pytest.mark.parametrize(
    "changes",
    [
        {"num_workers": 2, "activation_checkpointing": True},
        {"batch_size": 1, "log_every": 1, "attention": "dense"},
    ],
)
def test_settings_that_do_not_change_the_losses(tmp_path, uninterrupted, changes):
    train(tiny_config(tmp_path, **changes))
    for name, expected in zip(("loss", "validation_loss"), uninterrupted, strict=True):
        assert numbers(tmp_path, name) == pytest.approx({k: float(v) for k, v in expected.items()}, rel=1e-5)


def test_a_killed_run_resumes_with_the_same_losses(tmp_path, uninterrupted):
    config = tiny_config(tmp_path)
    process = start_process(train, config)
    log = tmp_path / "out" / "logs" / "log.txt"
    while not (log.exists() and "Step 6 |" in log.read_text()):
        assert process.is_alive()
        time.sleep(0.01)
    process.kill()
    process.join()
    killed_at = max(losses(tmp_path))
    assert killed_at < 12, "it was over before it was killed"

    with pytest.raises(ValueError, match="holds checkpoints up to step"):
        train(config)
    log.unlink()
    config.resume = True
    train(config)
    resumed = losses(tmp_path)
    assert min(resumed) in (5, 9)  # checkpoints are at 4 and 8
    assert resumed == {step: loss for step, loss in uninterrupted[0].items() if step in resumed}
    assert max(resumed) == 12
    validation = losses(tmp_path, "validation_loss")
    assert validation == {step: loss for step, loss in uninterrupted[1].items() if step in validation}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.max_seq_len": 24}, "max_seq_len=32 and this dataset has max_seq_len=24"),
        ({"data.encoder.add_eos": False}, "made with another encoder: .* makes other tokens of "),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(tmp_path_factory, changes, message):
    folder = tmp_path_factory.getbasetemp() / "refused"
    if not folder.exists():
        train(tiny_config(folder, max_steps=4, validation=None))
    with pytest.raises(ValueError, match=message):
        train(tiny_config(folder, validation=None, resume=True, **changes))


@pytest.mark.filterwarnings("always::UserWarning")
def test_settings_that_a_resume_cannot_heed_are_named(tmp_path, recwarn):
    train(tiny_config(tmp_path, max_steps=4, validation=None))
    assert not [warning for warning in recwarn if "not heeded" in str(warning.message)]
    changes = {"data.num_lanes": 4, "optimizer.lr": 0.5, "optimizer.eps": 1e-3, "max_steps": 8}
    train(tiny_config(tmp_path, validation=None, resume=True, **changes))
    said = " ".join(str(warning.message) for warning in recwarn)
    assert "num_lanes=4 is not heeded: the state was made with num_lanes=2, which a run keeps" in said
    assert (
        "optimizer.lr=0.5 is not heeded: the optimizer goes on as its checkpoint has it, which was made with lr=0.02"
        in said
    )
    assert "optimizer.eps=0.001 is not heeded: " in said
    assert max(numbers(tmp_path, "lr").values()) <= 0.02


def test_a_changed_corpus_is_refused_at_resume(tmp_path):
    train(tiny_config(tmp_path, max_steps=4))
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"text": "cat"}\n')
    with pytest.raises(
        ValueError,
        match=r"the corpus is not the one that the state was made with: 1 changed \(.*rows\.jsonl\)",
    ):
        train(tiny_config(tmp_path, resume=True))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.source._component_": "os.system"}, "not among the components"),
        ({"data.source.paths": "/nowhere/*.jsonl"}, "no file matches '/nowhere/"),
        ({"data.encoder.column": "body"}, r"rows.jsonl:\d+: column 'body' is missing"),
    ],
)
def test_bad_configs(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        train(tiny_config(tmp_path, **changes))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch, about what torch does when it compiles
def test_a_compiled_model_has_the_same_losses(tmp_path, uninterrupted):
    train(tiny_config(tmp_path, compile=True))
    assert numbers(tmp_path) == pytest.approx({k: float(v) for k, v in uninterrupted[0].items()}, rel=1e-4)


def changing(folder, **changes):
    """Return a config that reads a folder of files."""
    config = tiny_config(folder, **{"log_every": 4} | changes)
    config.data.source.paths = str(folder / "corpus")
    return config


def test_files_may_come_and_go_where_the_config_says_so_and_validation_keeps_no_list(tmp_path):
    corpus, held_out, lists = tmp_path / "corpus", tmp_path / "held_out", tmp_path / "out" / "corpus_lists"
    for folder in (corpus, held_out):
        folder.mkdir()
        for number in range(4):
            write_rows(folder / f"{number}.jsonl", 60)
    validation = {"source": {"_component_": "streampack.JSONLSource", "paths": str(held_out)}, "max_packs": 4}
    changes = {"validation": validation, "data.corpus_changes": "allow"}
    train(changing(tmp_path, max_steps=4, **changes))
    [first] = lists.iterdir()

    (corpus / "1.jsonl").unlink()
    shutil.copy(corpus / "2.jsonl", corpus / "9.jsonl")
    (held_out / "1.jsonl").unlink()
    with pytest.raises(ValueError, match=r"1 added \(.*/9.jsonl\), 1 removed \(1.jsonl\).*corpus_changes="):
        train(changing(tmp_path, max_steps=8, resume=True, validation=validation))
    with pytest.warns(UserWarning, match=r"1 added \(.*/9.jsonl\), 1 removed \(1.jsonl\)"):
        result = train(changing(tmp_path, max_steps=8, resume=True, **changes))
    assert result["step"] == 8
    assert result["ledger"].dropped_samples["removed"] > 0
    assert first in lists.iterdir()
    assert len(list(lists.iterdir())) == 2


def test_a_config_that_keeps_no_lists_cannot_allow_changes(tmp_path):
    changes = {"data.corpus_changes": "allow", "data.corpus_lists": None}
    with pytest.raises(ValueError, match=r"data: corpus_changes=.allow. needs corpus_lists"):
        train(changing(tmp_path, **changes))
