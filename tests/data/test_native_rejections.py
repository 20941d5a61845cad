"""What the native decoder rejects: the same results and refusals as the reference implementation alone.

There is one allowed difference, which `test_damaged_files_give_the_result_of_the_reference_implementation` leaves out:
a header that Pillow's own parser refuses and libjpeg accepts. The index reads every header with Pillow, so such a file
gets no further.
"""

import io
import struct

import numpy as np
import pytest
from support.jpegs import (
    crop_file,
    crop_natively,
    draw_box,
    draw_jpeg,
    get_refusal,
    get_rejection,
    make_exif,
    make_jpeg,
    make_ppm,
    make_unusual_images,
)

from podscale.data import crop, decode
from podscale.errors import UserError

native = pytest.importorskip("podscale.data._native", reason="built without a C compiler or libjpeg-turbo")


# --- left to the reference implementation --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", make_unusual_images())
def test_images_that_the_native_decoder_rejects_are_cropped_by_the_reference_implementation(kind):
    data, box = make_unusual_images()[kind]
    assert get_rejection(data, box)
    expected = np.zeros((16, 16, 3), np.uint8)
    decode.crop_image(data, box, True, 16, expected)
    assert np.array_equal(crop_file(data, box, flip=True), expected)


@pytest.mark.parametrize("orientation", [0, 1, 9])
def test_upright_images_are_not_rejected(orientation):
    assert get_rejection(make_jpeg(np.random.default_rng(0), 20, 20, exif=make_exif(orientation))) is None


def test_a_refusal_is_the_sentence_of_the_reference_implementation():
    data = make_jpeg(np.random.default_rng(2), 64, 64, quality=90)
    huge = data.replace(struct.pack(">HH", 64, 64), struct.pack(">HH", 65000, 65000))
    for bad in (b"", b"no image", data[:1500], data[:-2], huge):
        with pytest.raises(UserError) as caught:
            decode.crop_image(bad, (0, 0, 8, 8), False, 16, np.zeros((16, 16, 3), np.uint8), "photo 0.jpg")
        assert get_refusal(bad) == str(caught.value)
    assert get_rejection(huge) == "too much memory"


def test_a_file_of_very_many_scans_is_rejected_and_not_tiled():
    gray = make_jpeg(np.random.default_rng(16), 64, 64, gray=True)
    frame, scan = gray.index(b"\xff\xc0"), gray.index(b"\xff\xda")
    color = b"\xff\xc0\0\x11" + gray[frame + 4 : frame + 9] + b"\3\1\x11\0\2\x11\0\3\x11\0"
    head, coded = gray[:frame] + color + gray[frame + 13 : scan], gray[scan + 10 : -2]

    def make_scans(channels):  # one scan per channel, all of the same gray
        return b"".join(b"\xff\xda\0\x08\1%c\0\0\x3f\0" % channel + coded for channel in channels)

    separate = head + make_scans([1, 2, 3]) + gray[-2:]
    assert get_rejection(separate) is None
    assert np.array_equal(decode.decode_image(native.tile(separate, 2**28)), decode.decode_image(separate))
    many = head + make_scans([1, 2, 3] * 40) + gray[-2:]
    assert get_rejection(many) is None
    assert np.array_equal(decode.decode_image(native.tile(many, 2**28)), decode.decode_image(separate))


def test_a_file_truncated_below_the_crop_is_refused():
    data = make_jpeg(np.random.default_rng(3), 200, 200, quality=90)
    assert "truncated" in get_refusal(data[: len(data) * 9 // 10], (0, 0, 20, 20))


def test_an_image_does_not_use_the_tables_of_the_previous_one():
    whole = make_jpeg(np.random.default_rng(15), 64, 64)
    start = whole.index(b"\xff\xdb")
    (size,) = struct.unpack_from(">H", whole, start + 2)
    lacking = whole[:start] + whole[start + 2 + size :]
    out = np.zeros((4, 8, 8, 3), np.uint8)
    rejected = crop_natively([whole, lacking, whole, lacking], [(0, 0, 64, 64)] * 4, [False] * 4, 8, out)
    assert [i for i, _ in rejected] == [1, 3]


@pytest.mark.heavy
def test_damaged_files_give_the_result_of_the_reference_implementation(monkeypatch):
    rng = np.random.default_rng(4)
    seeds = [draw_jpeg(rng, (120, 90)) for _ in range(25)]
    native_crops = 0
    for _ in range(2000):
        data = damage(rng, seeds[rng.integers(len(seeds))][0])
        try:
            header = decode.read_header(io.BytesIO(data))
        except UserError:
            continue
        if header.width * header.height > 2**18:  # correct, but slow
            continue
        box, results = draw_box(rng, header.width, header.height), []
        native_crops += get_rejection(data, box) is None
        for decoder in ("native", "plain"):
            monkeypatch.setenv("PODSCALE_DECODER", decoder)
            try:
                results.append(crop_file(data, box).tobytes())
            except UserError as error:
                results.append(str(error))
        assert results[0] == results[1]
    assert native_crops > 200


def damage(rng, data):
    """Flip one to four bits, in half of all cases near the header; or truncate; or both."""
    changed = bytearray(data)
    kind = rng.integers(4)
    if kind < 3:
        for _ in range(rng.integers(1, 5)):
            changed[rng.integers(700 if kind == 0 and len(data) > 700 else len(data))] ^= 1 << rng.integers(8)
    if kind > 1:
        del changed[rng.integers(2, len(data)) :]
    return bytes(changed)


# --- choice of the decoder -----------------------------------------------------------------------------------------


def test_without_the_native_module_the_reference_implementation_decodes(monkeypatch):
    data = make_jpeg(np.random.default_rng(6), 50, 40)
    expected = crop_file(data, (3, 4, 40, 35))
    monkeypatch.setattr(decode, "native", None)
    assert decode.select_decoder().startswith("plain (the native decoder was not built")
    assert np.array_equal(crop_file(data, (3, 4, 40, 35)), expected)


def test_the_environment_variable_selects_the_decoder(monkeypatch):
    monkeypatch.setattr(crop, "_crop_natively", None)
    monkeypatch.setenv("PODSCALE_DECODER", "plain")
    assert decode.select_decoder() == "plain (PODSCALE_DECODER asks for it)"
    crop_file(make_jpeg(np.random.default_rng(7), 50, 40), (3, 4, 40, 35))
    monkeypatch.setenv("PODSCALE_DECODER", "fast")
    with pytest.raises(UserError, match="PODSCALE_DECODER"):
        decode.select_decoder()


def test_time_stages_returns_the_seconds_of_each_stage(tmp_path):
    rng = np.random.default_rng(0)
    contents = {"jpeg": make_jpeg(rng, 400, 300), "ppm": make_ppm(rng, 400, 300)}
    box, flip, start, length = (
        np.array([[10.0, 10, 300, 290]]),
        np.array([True]),
        np.zeros(1, np.int64),
        -np.ones(1, np.int64),
    )
    for name, data in contents.items():
        (tmp_path / name).write_bytes(data)
        read, entropy, transform, resize = native.time_stages(
            [str(tmp_path / name)], start, length, box, flip, 64, 2**28
        )
        assert read > 0
        assert resize > 0
        assert (entropy > 0) == (name == "jpeg")
        assert transform >= 0
    assert (
        native.time_stages([b"junk", b"P6"], *np.zeros((2, 2), np.int64), np.zeros((2, 4)), np.zeros(2, bool), 8, 9)[3]
        == 0
    )
    with pytest.raises(ValueError, match="out of range"):
        native.time_stages([], start[:0], length[:0], box[:0], flip[:0], 0, 2**28)


def test_wrong_arguments_are_refused():
    zeros, boxes, flips, out = (
        np.zeros(1, np.int64),
        np.zeros((1, 4)),
        np.zeros(1, bool),
        np.zeros((1, 8, 8, 3), np.uint8),
    )
    good = ([b"x"], zeros, zeros, boxes, flips, 8, out, 1, 2**28)
    assert native.crop(*good)
    wrong = [(1, zeros[:0]), (2, zeros[:0]), (3, np.zeros(3)), (4, np.zeros(2, bool)), (5, 9), (5, 0), (6, out[:0])]
    for position, value in [*wrong, (7, 0), (7, 10**6)]:
        with pytest.raises(ValueError, match=r"must be|out of range"):
            native.crop(*good[:position], value, *good[position + 1 :])
    for position, value in [(0, (b"x",)), (0, [None]), (0, [1.5]), (6, bytes(192))]:
        with pytest.raises(TypeError):
            native.crop(*good[:position], value, *good[position + 1 :])
    assert native.crop([], zeros[:0], zeros[:0], boxes[:0], flips[:0], 8, out[:0], 1, 2**28) == []
