"""The encoder of conversations with images: where images come from, what is trained, and what is refused."""

from __future__ import annotations

import base64
import copy
import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streampack import (
    IGNORE_INDEX,
    IterablePackedDataset,
    JSONLSource,
    MapSource,
    MediaSample,
    PackedDataLoader,
    VisionEncoder,
    collate_packed,
    prepare_model_for_packing,
)
from streampack.packing import media as media_of_packs
from streampack.packing.encoders import pictures
from tests.vision.families import FAMILIES, ID, build, picture, processor_of

Image = pytest.importorskip("PIL.Image")
ANSWER = {"role": "assistant", "content": "four five"}


def png(number: int, **sizes: int) -> bytes:
    made = io.BytesIO()
    Image.fromarray(picture(number, **sizes)).save(made, "PNG")
    return made.getvalue()


def ask(*parts: Any) -> list[dict[str, Any]]:
    content = [part if isinstance(part, dict) else {"type": "text", "text": part} for part in parts]
    return [{"role": "user", "content": content}, ANSWER]


def encoder(family: str = "qwen2_vl", **settings: Any) -> VisionEncoder:
    return VisionEncoder(processor_of(family), **settings)


def media(sample: Any) -> dict[str, Any]:
    assert isinstance(sample, MediaSample)
    assert sample.media is not None
    return sample.media


def test_images_come_from_anywhere_and_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fsspec = pytest.importorskip("fsspec")
    (tmp_path / "a.png").write_bytes(png(1))
    for name in "ab":
        with fsspec.open(f"memory://vision/{name}.png", "wb") as file:
            file.write(png(1))
    uri = "data:image/png;base64," + base64.b64encode(png(1)).decode()
    monkeypatch.chdir(tmp_path)
    given = [
        picture(1), png(1), Image.fromarray(picture(1)), "a.png", str(tmp_path / "a.png"), tmp_path / "a.png",
        f"file://{tmp_path}/a.png", "memory://vision/a.png", uri, {"bytes": png(1), "path": None},
        {"bytes": None, "path": "a.png"},
    ]  # fmt: skip
    make = encoder(model=build("qwen2_vl"), ignore=["chosen"], anywhere=True)
    first = make({"messages": ask({"type": "image", "image": given[0]}, "x")})
    talk = [{"role": "user", "content": "x"}, ANSWER]
    for each in given:
        rows: list[dict[str, Any]] = [
            {"messages": ask({"type": "image", "image": each}, "x")},
            {"messages": ask({"type": "image"}, "x"), "images": [each]},
            {"messages": json.dumps(ask({"type": "image", "text": None}, "x")), "images": [each]},
            {"messages": talk, "images": np.array([each, None], object)[:1]},
            {
                "messages": [
                    talk[0] | {"content": [{"type": "image", "value": each}, {"type": "text", "value": "x"}]},
                    ANSWER,
                ]
            },
            {"messages": talk, "image": each, "images": []},
            {"prompt": talk[:1], "completion": [ANSWER], "images": [each]},
            {"prompt": json.dumps(talk[:1]), "completion": ANSWER, "image": each},
            {
                "chosen": talk,
                "messages": talk,
                "images": [each],
            },  # another column of messages is no place for it
        ]
        before = repr(rows)
        for row in rows:
            again = make(row)
            assert np.array_equal(again.tokens, first.tokens), each
            assert np.array_equal(again.labels, first.labels), each
            assert np.array_equal(media(again)["pixel_values"], media(first)["pixel_values"]), each
        assert repr(rows) == before
    assert "does not read" not in caplog.text
    url = make({"messages": ask({"type": "image_url", "image_url": {"url": uri}}, "x")})
    assert np.array_equal(media(url)["pixel_values"], media(first)["pixel_values"])
    there = encoder(folder="memory://vision")
    by_folder = there({"messages": ask("x"), "images": "a.png"})
    there({"messages": ask("x"), "images": ["b.png", "a.png"]})
    assert [len(storage.own()[1]) for storage in there.read_picture.storages.values()] == [1], (
        "no list that grows"
    )
    assert np.array_equal(media(by_folder)["pixel_values"], media(first)["pixel_values"])
    turned = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter to the right
    Image.fromarray(picture(1)).save(turned, "PNG", exif=exif)
    upright = make({"messages": ask("x"), "images": [np.rot90(picture(1), -1).copy()]})
    assert np.array_equal(
        media(make({"messages": ask("x"), "images": [turned.getvalue()]}))["pixel_values"],
        media(upright)["pixel_values"],
    )


@pytest.mark.parametrize("family", ["qwen2_vl", "gemma3", "idefics3", "internvl", "mistral3"])
def test_answers_are_trained_and_images_never(family: str) -> None:
    make = encoder(family)
    answer = {"role": "assistant", "content": [{"type": "text", "text": "seven "}, {"type": "image"}]}
    row = {"messages": [*ask("one", {"type": "image"}, "two", {"type": "image"}), *ask("x")[:1], answer]}
    row["images"] = [picture(i, width=20 + i) for i in range(3)]
    sample = make(row)
    assert isinstance(sample, MediaSample)
    assert sample.images == 3
    image_ids = processor_of(family).image_token_ids
    seen = np.isin(sample.tokens, image_ids)
    assert (sample.labels[seen] == IGNORE_INDEX).all()
    trained = sample.tokens[sample.labels != IGNORE_INDEX]
    text = make.decode(trained.tolist())
    # Nothing of what an image becomes: no marks of its rows and ends.
    assert text.replace("\n", "") == "four five<|im_end|>seven <|im_end|>"
    last = encoder(family, answers="last")(row)
    assert make.decode(last.tokens[last.labels != IGNORE_INDEX].tolist()).startswith("seven ")


TEXT = {"type": "text", "text": "five "}
SEEN = {"type": "image"}
TALKS: dict[str, list[dict[str, Any]]] = {
    "several": ask(SEEN, "one", SEEN, SEEN, "two"),
    "system": [{"role": "system", "content": [TEXT]}, *ask("one", SEEN, "two"), *ask("three")],
    "answers": [*ask("one"), *ask(SEEN, "two")[:1], {"role": "assistant", "content": [TEXT, SEEN]}],
    "tool": [*ask("one"), {"role": "tool", "content": [SEEN, TEXT]}, ANSWER],
    "texts": [*ask("one", "two", " three"), *ask("x")],
}
REAL = {  # families, by TRL's chat templates that they take
    "gemma3": ["gemma3"], "idefics3": ["idefics3"], "smolvlm": ["smolvlm"], "qwen2_5_vl": ["qwen2_vl", "qwen2_5_vl"],
    "qwen3_vl": ["qwen3_vl"], "llava_next": ["llava", "llava_onevision"],
}  # fmt: skip


def begun(processor: Any) -> Any:
    """A processor whose tokenizer begins texts with BOS, as that of Llama does."""
    tokenizers = pytest.importorskip("tokenizers")
    made = copy.deepcopy(processor)
    begin = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", ID["<s>"])])
    made.tokenizer.backend_tokenizer.post_processor = begin
    return made


@pytest.mark.parametrize(
    ("family", "real"), [*((each, "") for each in FAMILIES), *((each, name) for name in REAL for each in REAL[name])]
)  # fmt: skip
def test_tokens_are_those_of_the_processor(family: str, real: str) -> None:
    processor, talks = begun(processor_of(family)), list(TALKS)
    if real:
        folder = Path(pytest.importorskip("trl").__file__).parent / "chat_templates"
        text = (folder / f"{real}_training.jinja").read_text().replace("<|image_pad|>", "<image>")
        processor.chat_template = text.replace("<end_of_turn>", "<|im_end|>")
        talks = ["several", "system", "texts"]
    make = VisionEncoder(processor)
    for name in talks:
        talk, counter = copy.deepcopy(TALKS[name]), iter(range(9))
        for message in talk:
            if isinstance(message["content"], str):
                message["content"] = [{"type": "text", "text": message["content"]}]
            for part in message["content"]:
                if part["type"] == "image":
                    part["image"] = Image.fromarray(picture(next(counter), width=20 + next(counter)))
        theirs = processor.apply_chat_template(talk, tokenize=True, return_dict=True, return_tensors="pt")
        ours = make({"messages": talk})
        assert ours.tokens.tolist() == theirs["input_ids"][0].tolist(), name
        assert isinstance(ours, MediaSample) == ("pixel_values" in theirs) == (name != "texts")
        if isinstance(ours, MediaSample):
            pixels = theirs["pixel_values"]
            assert np.array_equal(
                media(ours)["pixel_values"], pixels.reshape(media(ours)["pixel_values"].shape)
            )


def test_an_outage_ends_the_run_and_makes_no_row_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec = pytest.importorskip("fsspec")

    class Down(fsspec.AbstractFileSystem):  # type: ignore[misc]
        protocol = "downtest"

        def info(self, path: str, **_: Any) -> dict[str, Any]:
            raise {"a": ConnectionError, "b": PermissionError}[path[-5]]("no answer")

    fsspec.register_implementation("downtest", Down, clobber=True)
    made = encoder(anywhere=True, storage={"max_outage": 0})
    for name, kind, why in (
        ("a", ConnectionError, "a.png: Conn.*the row is not at fault"),
        ("b", ValueError, "1 broken, and skipped"),
    ):
        rows = [{"messages": ask("x"), "images": [f"downtest://host/{name}.png"]}]
        packs = IterablePackedDataset(MapSource(rows), max_seq_len=64, encoder=made, num_lanes=1, skip_bad=9)
        with pytest.raises(kind, match=why):
            list(packs)
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(ConnectionError, match="needs fsspec"):
        encoder(anywhere=True)({"messages": ask("x"), "images": ["memory://host/a.png"]})


def test_padding_of_small_images_to_a_large_one_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"messages": ask("x"), "images": [picture(i, width=8 + 16 * (i == 3), height=8)]} for i in range(20)
    ]
    packs = IterablePackedDataset(MapSource(rows), max_seq_len=4096, encoder=encoder("mistral3"), num_lanes=1)
    [pack] = packs
    made = collate_packed([pack]).media
    assert made is not None
    size = made.tensors["pixel_values"].nbytes
    monkeypatch.setattr(media_of_packs, "MOST_PADDED", size - 1)
    with pytest.raises(ValueError, match=f"of 20 samples, .* would take {size:,} bytes.*set max_media"):
        collate_packed([pack])
    monkeypatch.setattr(media_of_packs, "MOST_PADDED", size)
    assert collate_packed([pack]).media is not None


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_is_transparent_is_white(mode: str) -> None:
    clear, whole = Image.new("RGBA", (24, 24)), Image.new("RGB", (24, 24), "white")
    for made in (clear, whole):
        made.paste((90, 90, 90), (4, 4, 12, 12))
    body = io.BytesIO()
    clear.convert(mode).save(body, "PNG")
    seen = [encoder()({"messages": ask("x"), "images": [each]}) for each in (body.getvalue(), whole)]
    ours, expected = (media(sample)["pixel_values"] for sample in seen)
    assert np.abs(ours - expected).max() < 0.1  # a palette has fewer colours


def test_numbers_of_16_bits_are_scaled_and_others_refused() -> None:
    shades = np.linspace(0, 254, 24 * 24).reshape(24, 24).astype(np.uint8)
    body = io.BytesIO()
    Image.fromarray(shades.astype(np.uint16) * 257 + 100).save(body, "PNG")
    seen = [encoder()({"messages": ask("x"), "images": [each]}) for each in (body.getvalue(), shades)]
    assert np.array_equal(*(media(sample)["pixel_values"] for sample in seen))
    for kind in (np.int32, np.float32):
        with pytest.raises(ValueError, match="nothing says which of its numbers is white"):
            encoder()({"messages": ask("x"), "images": [Image.fromarray(shades.astype(kind))]})


def test_a_bad_image_is_named_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "b.png").write_bytes(png(3)[:150])
    lines = [{"messages": ask("x"), "images": ["b.png"]}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    made = encoder(folder=tmp_path)
    source = JSONLSource(tmp_path / "rows.jsonl")
    with pytest.raises(
        ValueError, match=r"rows.jsonl.*1: image 0: it cannot be decoded \(OSError: .*truncated"
    ):
        list(IterablePackedDataset(source, max_seq_len=128, encoder=made))
    for given, why in {
        "c.png": "image 0: .*c.png: there is no such file",
        f"{png(1).hex()}.png": "^image 0: .*File name too long.{300,400}$",
        "ftp://host/a.png": "image 0: URLs that begin with 'ftp' are refused",
    }.items():
        with pytest.raises(ValueError, match=why):
            made({"messages": ask("x"), "images": [given]})
    with pytest.raises(ValueError, match="image 1: it has 90 x 60 pixels, max_pixels is 5,000"):
        encoder(max_pixels=5000)({"messages": ask("x"), "images": [png(0), png(1, width=90, height=60)]})
    with pytest.raises(ValueError, match="bytes, max_bytes is 100"):
        encoder(max_bytes=100)({"messages": ask("x"), "images": [png(0)]})


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="imagez' is no folder; every image"):
        encoder(folder=str(tmp_path / "imagez"))


def test_images_side_by_side_have_no_positions() -> None:
    made = VisionEncoder(processor_of("qwen2_vl"), model=build("qwen2_vl").config)
    rows = {"messages": ask("x"), "images": [picture(1), picture(2)]}
    with pytest.raises(ValueError, match="must set a token between two images"):
        made(rows)


def test_images_of_a_row_are_bounded_together() -> None:
    made, square = encoder(max_pixels=24 * 24), picture(1, width=24, height=24)
    assert len(media(made({"messages": ask("x"), "images": [square] * 4}))["pixel_values"]) > 0
    with pytest.raises(ValueError, match=r"image 4: with those before it .* more than 2,304 pixels"):
        made({"messages": ask("x"), "images": [square] * 5})


@pytest.mark.parametrize("family", ["qwen2_vl", "gemma3", "llava"])
def test_a_text_that_writes_image_has_the_images_of_its_column_there(family: str) -> None:
    """As LLaVA and LLaMA-Factory write it, whatever the placeholder of the processor."""
    make = encoder(family)
    images = [png(1), png(2)]
    parts = ask("one", {"type": "image"}, "two\n", {"type": "image"})
    wanted = make({"messages": parts, "images": images})
    for content in ("one<image>two\n<image>", [{"type": "text", "text": "one<image>two\n<image>"}]):
        talk = [{"role": "user", "content": content}, ANSWER]
        for messages in (talk, json.dumps(talk)):
            found = make({"messages": messages, "images": images})
            assert found.tokens.tolist() == wanted.tokens.tolist()
            assert np.array_equal(media(found)["pixel_values"], media(wanted)["pixel_values"])
    with pytest.raises(ValueError, match="more parts for images than images"):
        make({"messages": talk, "images": images[:1]})
    with pytest.raises(ValueError, match="has 3 images, and the messages have parts for 2"):
        make({"messages": talk, "images": [*images, png(3)]})
    with pytest.raises(ValueError, match=r"column 'videos' would be ignored.*ignore: \[videos\]"):
        make({"messages": talk, "images": images, "videos": ["a.mp4"]})


def test_rows_whose_images_and_texts_do_not_fit_are_refused() -> None:
    make = encoder()
    for row, why in (
        ({"messages": ask({"type": "image"}, "x")}, "more parts for images than images"),
        (
            {"messages": ask({"type": "image"}, "x"), "images": [png(0), png(1)]},
            "has 2 images, and .* parts for 1",
        ),
        ({"messages": [ANSWER], "images": [png(0)]}, "no message of the user is there"),
        ({"messages": ask("see <image> here")}, "writes 1 placeholder.s. of images .* for 0 image"),
        ({"messages": ask("see <image>", {"type": "image"}), "images": [png(0)]}, "writes 2 placeholder"),
        ({"messages": ask({"type": "image"}, "x"), "images": [None]}, "or one is null"),
        ({"messages": ask({"type": "video", "video": "a.mp4"})}, "a part that is 'video'"),
        ({"prompt": "x", "completion": "y", "images": [png(0)]}, "no message of the user is there"),
    ):
        with pytest.raises(ValueError, match=why):
            make(row)
    with pytest.raises(ValueError, match="writes 1 placeholder"):
        encoder("gemma3")({"messages": ask("see <start_of_image>")})
    with pytest.raises(ValueError, match="the token <image>, which stands for"):
        encoder("gemma3")({"messages": ask("see <image>")})
    with pytest.raises(ValueError, match="has no image_token"):
        VisionEncoder(make.tokenizer.tokenizer)
    assert ID["<image>"] in make({"messages": ask({"type": "image"}, "x"), "images": png(0)}).tokens
    assert encoder("llava", model=build("llava")).rule is None


@pytest.mark.parametrize("family", ["llava_onevision", "qwen2_vl", "gemma3", "internvl"])
def test_texts_that_write_tokens_of_media_are_bad_records(family: str) -> None:
    pair = {"completion": " y"}
    rows = [
        {"messages": ask("an <image> tag", {"type": "image"}), "images": [png(0)]},
        {"prompt": "an <image> tag", **pair},
        {"prompt": "x", "completion": " an <image> tag"},
        {"messages": ask({"type": "image"}, "x"), "images": [png(0)]},
        {"prompt": "a tag", **pair},
    ]
    rows += [] if family == "gemma3" else [  # it has no token for videos
        {"messages": ask("a <video> tag")},
        {"messages": ask("a <video> tag", {"type": "image"}), "images": [png(0)]},
        {"prompt": "a <video> tag", **pair},
    ]  # fmt: skip
    model = build(family)
    inputs = prepare_model_for_packing(model, attention="dense")
    encode = encoder(family, model=model.config)
    packs = IterablePackedDataset(MapSource(rows), max_seq_len=192, encoder=encode, num_lanes=1, skip_bad=9)
    for batch in PackedDataLoader(packs, batch_size=1):
        inputs(batch)
    assert packs.ledger().dropped_samples["bad"] == len(rows) - 2


def test_options_of_storage_are_told_to_the_folders_server_only(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, Any] = {}

    def storage_of(paths: list[str], storage: Any, redirect: Any) -> Any:
        told[paths[0]] = dict(storage.options)
        raise FileNotFoundError(paths[0])

    monkeypatch.setattr(pictures, "storage_of", storage_of)
    settings: dict[str, Any] = {"storage": {"options": {"token": "secret"}}, "anywhere": True}
    for folder, told_of in (
        ("https://ours/images", {
            "a.png": True, "https://ours/images/b.png": True, "https://ours/c.png": False,
            "https://ours/images.evil/d.png": False, "https://theirs/e.png": False, "s3://b/f.png": False,
        }),
        ("s3://ours/images", {"g.png": True, "s3://theirs/h.png": False}),
        (None, {"https://theirs/i.png": False, "s3://ours/j.png": True}),
    ):  # fmt: skip
        make = encoder(folder=folder, **settings)
        told.clear()
        for path in told_of:
            with pytest.raises((ValueError, FileNotFoundError)):
                make({"messages": ask("x"), "images": [path]})
        assert [bool(options) for options in told.values()] == list(told_of.values())


def test_rows_cannot_lead_out_of_the_folder(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "ours2"
    for folder in (ours / "a", theirs):
        folder.mkdir(parents=True)
        (folder / "a.png").write_bytes(png(1))
    (ours / "link.png").symlink_to(theirs / "a.png")
    # By its links "c/../../a.png" is in the folder, and by name, as it is read, outside.
    (ours / "b" / "d").mkdir(parents=True)
    (ours / "c").symlink_to(ours / "b" / "d")
    for folder in (ours, tmp_path):
        shutil.copy(theirs / "a.png", folder)
    fsspec = pytest.importorskip("fsspec")
    for place in ("ours/a/a.png", "ours2/a.png"):
        with fsspec.open(f"memory://{place}", "wb") as file:
            file.write(png(1))
    inside = ["a/a.png", "a/../a/a.png", str(ours / "a/a.png"), f"file://{ours}/a/a.png"]
    outside = [
        "../ours2/a.png",
        "link.png",
        "c/../../a.png",
        str(theirs / "a.png"),
        f"file://{theirs}/a.png",
        "memory://ours2/a.png",
    ]
    far = [
        *outside[3:],
        "memory://ours/../ours2/a.png",
        "../ours2/a.png",
        "%2e%2e/ours2/a.png",
        "a\\..\\..\\ours2/a.png",
    ]
    for given, kept, refused in (
        (ours, inside, outside),
        ("memory://ours", ["a/a.png", "memory://ours/a/a.png"], far),
    ):
        for image in kept:
            assert isinstance(
                encoder(folder=given)({"messages": ask("x"), "images": [image]}), MediaSample
            ), image
        for image in refused:
            with pytest.raises(ValueError, match="image 0: .* leads out of the folder of images"):
                encoder(folder=given)({"messages": ask("x"), "images": [image]})
    for image in outside:
        encoder(folder=ours, anywhere=True)({"messages": ask("x"), "images": [image]})


@pytest.mark.parametrize("remote", [False, True], ids=["local", "url"])
def test_without_a_folder_images_lie_in_the_folder_of_their_data_file(tmp_path: Path, remote: bool) -> None:
    """Each file of a corpus has its own; a row cannot name what lies elsewhere on this machine, or on a server."""
    fsspec = pytest.importorskip("fsspec")
    ours, theirs = tmp_path / "a" / tmp_path.name, tmp_path / "theirs"
    for number, folder in enumerate((ours / "one", ours / "two" / "images", theirs)):
        folder.mkdir(parents=True)
        (folder / "x.png").write_bytes(png(number))
    asked = {"one": "x.png", "two": "images/x.png"}
    for name, path in asked.items():
        (ours / name / "rows.jsonl").write_text(json.dumps({"messages": ask("x"), "images": [path]}))
    if remote:
        for path in (path for path in ours.rglob("*") if path.is_file()):
            fsspec.filesystem("memory").pipe(f"/{ours.name}/{path.relative_to(ours)}", path.read_bytes())
    place = f"memory://{ours.name}" if remote else str(ours)
    places = [f"{place}/{name}/rows.jsonl" for name in asked]
    data = IterablePackedDataset(JSONLSource(places), max_seq_len=256, encoder=encoder(), num_lanes=1)
    [batch] = PackedDataLoader(data, batch_size=1)
    expected = [encoder()({"messages": ask("x"), "images": [png(number)]}) for number in range(2)]
    assert np.array_equal(
        batch.media.tensors["pixel_values"],
        np.concatenate([media(each)["pixel_values"] for each in expected]),
    )
    traced = [data.trace(fragment) for fragment in batch.fragments[0]]
    assert [each["row"]["images"] for each in traced] == [[path] for path in asked.values()]
    assert [each["tokens"] for each in traced] == [sample.tokens.tolist() for sample in expected]

    away = {str(theirs / "x.png"), f"file://{theirs}/x.png", "../two/images/x.png", "memory://theirs/x.png"}
    for image in (*away, "http://127.0.0.1:9/x.png"):
        rows = json.dumps({"messages": ask("x"), "images": [image]})
        with fsspec.open(f"{place}/one/rows.jsonl", "w") as file:
            file.write(rows)
        source = JSONLSource(f"{place}/one/rows.jsonl")
        with pytest.raises(
            ValueError, match="image 0: .* leads out of the folder of images, .*one; add its folder"
        ):
            list(IterablePackedDataset(source, max_seq_len=256, encoder=encoder(), num_lanes=1))


def test_a_row_of_no_file_names_no_image_unless_a_folder_is_given(tmp_path: Path) -> None:
    (tmp_path / "x.png").write_bytes(png(1))
    row = {"messages": ask("x"), "images": [str(tmp_path / "x.png")]}
    with pytest.raises(ValueError, match="image 0: .*x.png: the row is of no file .*folder="):
        list(IterablePackedDataset([row], max_seq_len=256, encoder=encoder(), num_lanes=1))
    (tmp_path / "none").mkdir()
    for folder in ("/", tmp_path, [tmp_path / "none", tmp_path], [str(tmp_path / "none"), "/"]):
        assert list(
            IterablePackedDataset([row], max_seq_len=256, encoder=encoder(folder=folder), num_lanes=1)
        )
    several = encoder(folder=[tmp_path, tmp_path / "none"])
    assert several({"messages": ask("x"), "images": ["x.png"]}), "relative to the first"
    with pytest.raises(ValueError, match=r"folder=\[\] names no folder"):
        encoder(folder=[])
    assert encoder(anywhere=True)(row)


def test_conversations_of_sharegpt_have_images_too() -> None:
    """As LLaVA's: the same tokens and pixels as OpenAI's messages."""
    make = encoder()
    images = [png(1)]
    wanted = make({"messages": [{"role": "user", "content": "<image>one two"}, ANSWER], "images": images})
    talk = [{"from": "human", "value": "<image>one two"}, {"from": "gpt", "value": ANSWER["content"]}]
    found = make({"conversations": talk, "images": images})
    assert found.tokens.tolist() == wanted.tokens.tolist()
    assert found.labels.tolist() == wanted.labels.tolist()
    assert np.array_equal(media(found)["pixel_values"], media(wanted)["pixel_values"])
