"""A small model of each family, and recipes with all random features on."""

from types import MappingProxyType

from podscale import recipe as recipes
from podscale.models import convnext, efficientnet, registry, resnet, vit

STEPS = 3
BATCH, TRAIN_IMAGES = 64, 1437
STAGES = (efficientnet.Stage(1, 3, 1, 8, 1), efficientnet.Stage(2, 5, 1, 8, 1))


def build_resnet(config, classes, image_size, rngs):
    """Return a stem, one block and a head: compiled in half the time of a resnet8."""
    return resnet.ResNet(resnet.BasicBlock, (1,), config, classes, rngs)


def build_vit(config, classes, image_size, rngs):
    return vit.VisionTransformer(vit.Size(width=16, depth=1, heads=2), config, classes, image_size, rngs)


def build_efficientnet(config, classes, image_size, rngs):
    return efficientnet.EfficientNet(efficientnet.Size(0.25, 1.0), list(STAGES), config, classes, rngs)


def build_convnext(config, classes, image_size, rngs):
    return convnext.ConvNeXt(convnext.Size((1, 1), (8, 16)), config, classes, rngs)


BUILDERS = MappingProxyType(
    {"resnet": build_resnet, "vit": build_vit, "efficientnet": build_efficientnet, "convnext": build_convnext}
)


def register_models():
    """Make the models available to recipes as small_vit and so on."""
    for family, builder in BUILDERS.items():
        registry.register_model(f"small_{family}")(builder)


def unregister_models():
    for family in BUILDERS:
        registry.unregister_model(f"small_{family}")


RANDOM = MappingProxyType(
    {
        "model.dropout": 0.2,
        "model.drop_path": 0.5,
        "augment.mixup": 0.8,
        "augment.cutmix": 1.0,
        "augment.randaugment": 2,
        "augment.erase": 0.5,
        "augment.flip": True,
        "augment.brightness": 0.2,
        "augment.contrast": 0.2,
        "augment.label_smoothing": 0.1,
        "data.balance": True,
    }
)
ADAMW = MappingProxyType(
    {
        "optimizer.name": "adamw",
        "optimizer.weight_decay": 0.1,
        "optimizer.epsilon": 1e-3,  # with tiny gradients, a smaller one makes rounding errors large
        "schedule.peak": 1e-2,
    }
)
MUON = MappingProxyType({"optimizer.name": "muon", "optimizer.trust": 0.1, "schedule.peak": 0.2})
FEATURES = MappingProxyType(
    {
        "resnet": {
            "model.name": "resnet8",
            "model.width": 8,
            "model.dropout": 0.0,  # a ResNet has neither
            "model.drop_path": 0.0,
            "schedule.peak": 0.5,
            "optimizer.trust": 0.3,
        },
        "vit": {
            **ADAMW,
            "model.name": "small_vit",
            "model.patch": 2,
            "schedule.layer_decay": 0.7,
            "train.loss": "binary",
        },
        "efficientnet": {
            "model.name": "small_efficientnet",
            "model.norm_epsilon": 1e-3,
            "model.remat": True,
            "optimizer.name": "rmsprop",
            "optimizer.second_moment": 0.9,
            "optimizer.weight_decay": 1e-5,
            "schedule.peak": 1e-2,
            "data.train_sizes": [8, 10],
            "data.size_epochs": [32 / TRAIN_IMAGES],  # after the first step
            "train.class_weights": [0.5 + 0.1 * i for i in range(10)],
        },
        "convnext": {**ADAMW, "model.name": "small_convnext", "model.remat": True},
    }
)


def make_settings(family, **changes):
    """Return the fields of the family's recipe that differ from those of `digits`."""
    common = {
        "model.precision": "float64",
        "batch.size": BATCH,
        "batch.span": 16,
        "train.epochs": (STEPS - 0.5) * BATCH / TRAIN_IMAGES,
        "train.eval_epochs": 1,
        "optimizer.average": 0.9,
        "schedule.warmup_epochs": 0.02,
    }
    return common | RANDOM | FEATURES[family] | changes


def make_recipe(family, **changes):
    """Return a recipe of the family's small model for three steps in float64, with all random features on."""
    return recipes.override_recipe(recipes.load_recipe("digits"), make_settings(family, **changes))
