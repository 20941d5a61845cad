"""The peers of `input.py`: other libraries that make the same crops of the same files, each as its manual recommends.

Each works in one thread. FFCV is not among them: it draws its boxes itself and reads a format of its own.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image


@dataclass(frozen=True, eq=False)
class Task:
    """Crops of files to size x size: boxes [n, 4] in whole pixels (left, top, right, bottom), flipped or not."""

    paths: list[str]
    boxes: np.ndarray
    flips: np.ndarray
    size: int


BATCH = 32  # images, if a peer works in batches
CropMethod = Callable[[Task, np.ndarray], None]  # fills uint8 [n, size, size, 3]
MethodFactory = Callable[[], CropMethod]


def list_peers() -> dict[str, tuple[MethodFactory, bool]]:
    """Return each peer's factory, and whether the peer antialiases. A factory fails if its peer is not installed."""
    return {
        "torchvision, Pillow": (make_torchvision_pillow, True),
        "torchvision.io and v2": (make_torchvision_io, True),
        "OpenCV": (make_opencv, False),
        "simplejpeg and OpenCV": (make_simplejpeg, False),
        "PyTurboJPEG and OpenCV": (make_turbojpeg, False),
        "tf.data decode_and_crop_jpeg": (functools.partial(make_tf_data, antialias=False), False),
        "tf.data decode_and_crop_jpeg, antialiased": (functools.partial(make_tf_data, antialias=True), True),
        "DALI, CPU": (functools.partial(make_dali, antialias=False), False),
        "DALI, CPU, antialiased": (functools.partial(make_dali, antialias=True), True),
        "grain, a thread, and OpenCV": (make_grain, False),
    }


def make_pillow() -> CropMethod:
    def crop_files(task: Task, out: np.ndarray) -> None:
        for i, path in enumerate(task.paths):
            with open(path, "rb") as file:
                image = Image.open(file).convert("RGB")
            left, top, right, bottom = task.boxes[i].astype(int).tolist()
            part = image.crop((left, top, right, bottom)).resize((task.size, task.size), Image.Resampling.BILINEAR)
            out[i] = np.asarray(part.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if task.flips[i] else part)

    return crop_files


def make_torchvision_pillow() -> CropMethod:
    from torchvision.transforms import functional

    def crop_files(task: Task, out: np.ndarray) -> None:
        for i, path in enumerate(task.paths):
            left, top, right, bottom = task.boxes[i].astype(int).tolist()
            with open(path, "rb") as file:
                image = Image.open(file).convert("RGB")
            part = functional.resized_crop(image, top, left, bottom - top, right - left, [task.size, task.size])
            out[i] = np.asarray(functional.hflip(part) if task.flips[i] else part)

    return crop_files


def make_torchvision_io() -> CropMethod:
    import torch
    from torchvision.io import ImageReadMode, decode_image, read_file
    from torchvision.transforms.v2 import functional

    torch.set_num_threads(1)

    def crop_files(task: Task, out: np.ndarray) -> None:
        for i, path in enumerate(task.paths):
            left, top, right, bottom = task.boxes[i].astype(int).tolist()
            image = decode_image(read_file(path), ImageReadMode.RGB)
            part = functional.resized_crop(image, top, left, bottom - top, right - left, [task.size, task.size])
            out[i] = (functional.hflip(part) if task.flips[i] else part).permute(1, 2, 0).numpy()

    return crop_files


def _resize_with_opencv(image: np.ndarray, box: np.ndarray, flip: bool, size: int) -> np.ndarray:
    import cv2

    left, top, right, bottom = box.astype(int)
    part = cv2.resize(image[top:bottom, left:right], (size, size), interpolation=cv2.INTER_LINEAR)
    return cv2.flip(part, 1) if flip else part


def _crop_with_opencv(path: str, box: np.ndarray, flip: bool, size: int) -> np.ndarray:
    import cv2

    image = cv2.imdecode(np.fromfile(path, np.uint8), cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION)
    return cv2.cvtColor(_resize_with_opencv(image, box, flip, size), cv2.COLOR_BGR2RGB)


def make_opencv() -> CropMethod:
    import cv2

    cv2.setNumThreads(1)

    def crop_files(task: Task, out: np.ndarray) -> None:
        for i, path in enumerate(task.paths):
            out[i] = _crop_with_opencv(path, task.boxes[i], bool(task.flips[i]), task.size)

    return crop_files


def make_simplejpeg() -> CropMethod:
    import cv2
    from simplejpeg import decode_jpeg

    cv2.setNumThreads(1)

    def crop_files(task: Task, out: np.ndarray) -> None:
        for i, path in enumerate(task.paths):
            image = decode_jpeg(Path(path).read_bytes(), "RGB")
            out[i] = _resize_with_opencv(image, task.boxes[i], bool(task.flips[i]), task.size)

    return crop_files


def make_turbojpeg() -> CropMethod:
    import cv2
    from turbojpeg import TJPF_RGB, TurboJPEG

    cv2.setNumThreads(1)
    decoder = TurboJPEG()

    def crop_files(task: Task, out: np.ndarray) -> None:
        for i, path in enumerate(task.paths):
            image = decoder.decode(Path(path).read_bytes(), pixel_format=TJPF_RGB)
            out[i] = _resize_with_opencv(image, task.boxes[i], bool(task.flips[i]), task.size)

    return crop_files


def make_tf_data(antialias: bool) -> CropMethod:
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)

    @functools.cache
    def make_pipeline(task: Task) -> object:
        def crop(path: object, window: object, flip: object) -> object:
            part = tf.io.decode_and_crop_jpeg(tf.io.read_file(path), window, channels=3)
            part = tf.image.resize(part, (task.size, task.size), antialias=antialias)
            part = tf.cond(flip, lambda: tf.reverse(part, [1]), lambda: part)
            return tf.cast(tf.clip_by_value(tf.round(part), 0, 255), tf.uint8)

        left, top, right, bottom = task.boxes.astype(np.int32).T
        windows = np.stack([top, left, bottom - top, right - left], axis=1)
        return tf.data.Dataset.from_tensor_slices((task.paths, windows, task.flips)).map(crop).batch(BATCH)

    def crop_files(task: Task, out: np.ndarray) -> None:
        for i, images in enumerate(make_pipeline(task).as_numpy_iterator()):  # type: ignore[attr-defined]
            out[i * BATCH : (i + 1) * BATCH] = images

    return crop_files


def make_dali(antialias: bool) -> CropMethod:
    from nvidia.dali import fn, pipeline_def, types

    def count_batches(task: Task) -> int:
        return -(-len(task.paths) // BATCH)

    @functools.cache
    def make_pipeline(task: Task) -> object:
        def load_sample(info: object) -> tuple:
            position = info.idx_in_epoch % (count_batches(task) * BATCH)  # type: ignore[attr-defined]
            i = min(position, len(task.paths) - 1)  # fills the last batch
            corner = task.boxes[i, :2].astype(np.float32)
            extent = (task.boxes[i, 2:] - task.boxes[i, :2]).astype(np.float32)
            return np.fromfile(task.paths[i], np.uint8), corner, extent, np.array(int(task.flips[i]), np.int32)

        @pipeline_def(batch_size=BATCH, num_threads=1, device_id=None, prefetch_queue_depth=1)
        def build() -> object:
            files, corner, extent, flip = fn.external_source(load_sample, num_outputs=4, batch=False)
            options = {"axis_names": "WH", "normalized_anchor": False, "normalized_shape": False}
            part = fn.decoders.image_slice(
                files, corner, extent, output_type=types.RGB, adjust_orientation=False, **options
            )
            size = [task.size, task.size]
            part = fn.resize(part, size=size, interp_type=types.INTERP_LINEAR, antialias=antialias)
            return fn.flip(part, horizontal=flip)

        result = build()
        result.build()
        return result

    def crop_files(task: Task, out: np.ndarray) -> None:
        for batch in range(count_batches(task)):
            images = make_pipeline(task).run()[0]  # type: ignore[attr-defined]
            for i in range(batch * BATCH, min((batch + 1) * BATCH, len(task.paths))):
                out[i] = images.at(i - batch * BATCH)

    return crop_files


def make_grain() -> CropMethod:
    import cv2
    import grain.python as pygrain

    cv2.setNumThreads(1)

    def crop_files(task: Task, out: np.ndarray) -> None:
        def crop(i: int) -> np.ndarray:
            return _crop_with_opencv(task.paths[i], task.boxes[i], bool(task.flips[i]), task.size)

        data = pygrain.MapDataset.range(len(task.paths)).map(crop)
        for i, image in enumerate(data.to_iter_dataset(pygrain.ReadOptions(num_threads=1, prefetch_buffer_size=16))):
            out[i] = image

    return crop_files
