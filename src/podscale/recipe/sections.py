"""The sections of a recipe: frozen dataclasses of documented fields."""

from dataclasses import dataclass
from typing import Literal

from podscale.config.fields import document_field as _field


@dataclass(frozen=True)
class Data:
    """Where the images come from and how they are prepared."""

    source: Literal["digits", "folder", "npz", "tar", "tfrecord", "parquet", "cifar", "mnist"] = _field(
        "digits", "embedded digits, an image folder, an .npz file, a folder of shards, or CIFAR's or MNIST's own files"
    )
    path: str = _field("", "the folder (CLASS/FILE, train/CLASS/FILE and val/CLASS/FILE, or shards) or the .npz file")
    image_size: int = _field(8, "side of the square image the model sees, in pixels")
    train_sizes: tuple[int, ...] = _field(
        (), "image sizes of successive phases of training (evaluation uses image_size); none: image_size"
    )
    size_epochs: tuple[float, ...] = _field((), "epochs at which training moves to the next of train_sizes")
    shrink: int = _field(0, "shrink images to at most this many pixels on the longer side first; 0: off")
    lanes: int = _field(1, "independent shuffles that the data set is split into; a host reads only its own lanes")
    classes: int = _field(0, "number of classes; 0: determined from the data")
    balance: bool = _field(False, "sample every class equally often, regardless of its number of images")
    hold_out: float = _field(
        0.0, "fraction of the training images to validate on instead of the validation set; they are not trained on"
    )
    train_samples: int = _field(0, "number of training images; 0: determined from the data")
    val_samples: int = _field(0, "number of validation images; 0: determined from the data")
    eval_fraction: float = _field(1.0, "fraction of the shorter side that evaluation's centre crop keeps")
    eval_views: int = _field(
        1, "views that evaluation averages: 1; 2: also flipped; 6: both also shifted by one pixel along the diagonal"
    )
    max_image_mib: int = _field(1024, "largest memory to decode one image, in MiB; larger images count as bad")
    eval_confidence: float = _field(
        1.0, "use further views only if the first view's highest probability is below this; 1: always"
    )
    bad_share: float = _field(0.001, "fraction of a split's images that may be unreadable, at least one image; 0: none")
    mean: tuple[float, ...] = _field((0.485, 0.456, 0.406), "per-channel mean of pixels in 0..1")
    std: tuple[float, ...] = _field((0.229, 0.224, 0.225), "per-channel standard deviation of pixels in 0..1")

    @property
    def max_image_bytes(self) -> int:
        """Memory that decoding one image may take, in bytes."""
        return self.max_image_mib * 2**20


@dataclass(frozen=True)
class Model:
    """The network."""

    name: str = _field(
        "resnet8",
        "resnet8, 18, 34, 50, 101 or 152; vit_tiny, small or base; efficientnet_b0 to b5 or lite0 to lite4; "
        "convnext_tiny, small or base; cifarnet; or your own",
    )
    stem: Literal["conv7", "space_to_depth", "small"] = _field(
        "small", "ResNet stem: 7x7 with stride 2 and max-pool; the same function on 2x2 blocks; or 3x3 for small images"
    )
    activation: Literal["default", "cubic_gelu"] = _field(
        "default",
        "default: ReLU in ResNets, GELU in cifarnet; cubic_gelu: a faster cubic gate close to GELU (cifarnet)",
    )
    width: int = _field(64, "channels of the first stage (ResNets, cifarnet)")
    patch: int = _field(16, "patch size of Vision Transformers, in pixels")
    pooling: Literal["token", "mean"] = _field(
        "token", "Vision Transformers classify by a class token, or by the mean over all patches"
    )
    positions: Literal["learned", "sincos"] = _field(
        "learned", "position embeddings of a Vision Transformer: learned, or fixed sines and cosines"
    )
    padding: Literal["symmetric", "same"] = _field(
        "symmetric", "padding of EfficientNet's convolutions: symmetric, or as in TensorFlow"
    )
    norm_epsilon: float = _field(0.0, "epsilon of EfficientNet's batch norms; 0: 1e-5; TensorFlow uses 1e-3")
    precision: Literal["float32", "bfloat16", "float64"] = _field(
        "float32", "precision of the computation; parameters and statistics are at least float32 (float64 is for tests)"
    )
    dropout: float = _field(0.0, "dropout rate of the features before the head (not in ResNets)")
    drop_path: float = _field(
        0.0, "stochastic-depth rate of the last block; it grows from 0 at the first (not in ResNets)"
    )
    remat: bool = _field(False, "recompute each layer in the backward pass instead of storing its activations")
    init: str = _field(
        "",
        "initial weights: a run's folder, .safetensors, a torch state dict or hub:OWNER/NAME; "
        "`required`: refuse to train without",
    )
    freeze: tuple[str, ...] = _field((), "layers that are not trained, such as layers.0; body: all but the head")


@dataclass(frozen=True)
class Batch:
    """How many images make one update, and how many are normalized together."""

    size: int = _field(128, "images per update, over the whole pod")
    span: int = _field(64, "images that one batch-norm group averages over")


@dataclass(frozen=True)
class Optimizer:
    """How a gradient becomes an update."""

    name: Literal["lars", "sgd", "adamw", "muon", "rmsprop"] = _field("lars", "the update rule")
    form: Literal["mlperf", "scaled", "optax"] = _field("mlperf", "which published form of LARS")
    momentum: float = _field(0.9, "momentum; the first moment's decay for adamw")
    nesterov: bool = _field(False, "Nesterov's momentum (sgd, adamw, muon)")
    weight_decay: float = _field(1e-4, "weight decay")
    trust: float = _field(
        0.001,
        "trust coefficient of lars; for muon, the update's norm as a fraction of the kernel's, at learning rate 1",
    )
    newton_schulz: int = _field(5, "Newton-Schulz iterations of muon")
    renormalize: bool = _field(
        False, "muon rescales every kernel to norm √outputs before each update, and does not rescale the update"
    )
    rest_momentum: float = _field(0.0, "momentum of the parameters that muon leaves to sgd; 0: the same")
    epsilon: float = _field(
        0.0, "added to denominators (lars, adamw, rmsprop); 0: their defaults, which are none, 1e-8 and 1e-3"
    )
    second_moment: float = _field(0.999, "decay of the second moment of adamw and rmsprop")
    skip: tuple[str, ...] = _field(
        ("bias", "scale"), "parameters without weight decay and trust ratio, by the last part of their name"
    )
    clip_norm: float = _field(0.0, "clip gradients to this global norm; 0: never")
    average: float = _field(0.0, "decay of the weight average (EMA) that evaluation uses; 0: no average")


@dataclass(frozen=True)
class Schedule:
    """The learning rate over the run: linear warm-up to `peak`, then decay to `end`."""

    peak: float = _field(1.0, "learning rate at the end of warm-up, before scaling by the batch")
    bias_peak: float = _field(0.0, "peak of the parameters in optimizer.skip; 0: same as peak")
    head_peak: float = _field(0.0, "peak of the last layer, except its bias; 0: same as peak")
    stem_epochs: float = _field(
        0.0, "epochs in which the first layer runs through the whole schedule; then it stays fixed; 0: all epochs"
    )
    layer_decay: float = _field(
        1.0, "layer-wise learning-rate decay: a layer's rate as a fraction of the next layer's; 1: off"
    )
    scale_batch: int = _field(0, "batch size that peak refers to (linear scaling rule); 0: no scaling")
    warmup_epochs: float = _field(0.0, "epochs of linear warm-up from 0")
    decay: Literal["polynomial", "cosine", "step", "exponential", "constant"] = _field(
        "polynomial", "shape after warm-up"
    )
    power: float = _field(2.0, "exponent of polynomial decay")
    end: float = _field(1e-4, "learning rate at the end (polynomial, cosine)")
    milestones: tuple[float, ...] = _field((), "epochs at which step decay multiplies by `factor`")
    factor: float = _field(0.1, "factor of step and exponential decay")
    decay_epochs: float = _field(2.4, "exponential decay multiplies by `factor` every so many epochs")


@dataclass(frozen=True)
class Augment:
    """How training augments an image; everything is a function of (seed, pass or step, image or position)."""

    crop: Literal["resized", "padded", "centre"] = _field(
        "resized", "random-resized crop; a random shift with a padded border; or evaluation's centre crop"
    )
    min_area: float = _field(0.08, "smallest area of a resized crop, as a fraction of the image")
    max_aspect: float = _field(4 / 3, "largest aspect ratio of a resized crop")
    padding: int = _field(4, "border of a padded crop, in pixels (reflected)")
    flip: bool = _field(True, "flip each image horizontally with probability 1/2")
    alternate: bool = _field(False, "flip at random in the first pass, then alternate between flipped and not")
    randaugment: int = _field(0, "RandAugment operations per image; 0: none")
    magnitude: float = _field(9.0, "strength of RandAugment, 0 to 30")
    mixup: float = _field(0.0, "alpha of mixup between positions 2k and 2k+1; 0: none")
    cutmix: float = _field(0.0, "alpha of CutMix between positions 2k and 2k+1; 0: none")
    cutmix_chance: float = _field(0.5, "probability of CutMix instead of mixup, if both are on")
    erase: float = _field(0.0, "probability that a random rectangle is erased")
    brightness: float = _field(
        0.0, "brightness jitter: an image's normalized pixels are shifted by up to this much; 0: none"
    )
    contrast: float = _field(
        0.0, "contrast jitter: an image's normalized pixels are scaled by a factor of up to 1 ± this; 0: none"
    )
    label_smoothing: float = _field(0.0, "label smoothing: fraction of the target spread over all classes")


@dataclass(frozen=True)
class Train:
    """How long to train, how often to evaluate, from which seed."""

    epochs: float = _field(10.0, "passes over the training images")
    seed: int = _field(0, "seed of everything random")
    eval_epochs: float = _field(1.0, "epochs between evaluations")
    loss: Literal["softmax", "binary"] = _field(
        "softmax", "softmax cross-entropy; or the mean over classes of binary cross-entropies"
    )
    class_weights: tuple[float, ...] = _field((), "weights of the classes in the loss; none: all 1")
    stats_momentum: float = _field(0.9, "decay of the running batch-norm statistics, per update")
    bad_updates: int = _field(
        10, "consecutive non-finite updates before the run rolls back and skips their batches; 0: never"
    )
