"""Train your own model: any flax.nnx module from images to logits. Recipe and pods stay the same.

python examples/own_model.py
"""

import jax
from flax import nnx

import podscale


class Plain(nnx.Module):
    """Two convolutions with batch norm, then the mean over the image."""

    def __init__(self, width: int, classes: int, rngs: nnx.Rngs) -> None:
        self.first = nnx.Conv(3, width, (3, 3), use_bias=False, rngs=rngs)
        self.first_norm = podscale.BatchNorm(width)  # its groups follow the recipe's batch.span on every pod
        self.second = nnx.Conv(width, 2 * width, (3, 3), strides=2, use_bias=False, rngs=rngs)
        self.second_norm = podscale.BatchNorm(2 * width)
        self.head = nnx.Linear(2 * width, classes, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:  # [images, height, width, 3] -> [images, classes]
        x = nnx.relu(self.first_norm(self.first(images)))
        x = nnx.relu(self.second_norm(self.second(x)))
        return self.head(x.mean(axis=(1, 2)))


@podscale.register_model("plain")
def build_plain(config, classes, image_size, rngs):  # config: the recipe's model section
    return Plain(config.width, classes, rngs)


def main() -> None:
    recipe = podscale.load_recipe("digits").override({"model.name": "plain", "train.epochs": 6})
    summary = podscale.train(recipe, pod=podscale.find_pod(virtual="1x2"), folder="runs/plain")
    print(f"validation accuracy {summary['accuracy']:.1%}")


if __name__ == "__main__":
    main()
