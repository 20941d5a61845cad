"""Train from Python, read the metrics, and use the model.

python examples/train_from_python.py
"""

import podscale


def main() -> None:
    recipe = podscale.load_recipe("digits").override({"train.epochs": 6, "train.eval_epochs": 2})
    pod = podscale.find_pod(virtual="1x2")  # leave it out to use all available devices
    summary = podscale.train(recipe, pod=pod, folder="runs/from-python")
    print(f"validation accuracy {summary['accuracy']:.1%} after {summary['steps']} steps")

    run = podscale.Run.load("runs/from-python")
    losses = [line["loss"] for line in run.metrics() if line["event"] == "train"]
    print(f"the loss went from {losses[0]:.2f} to {losses[-1]:.2f}")

    (prediction,) = podscale.predict(run, [run.folder / "sample.png"])
    best = prediction["top"][0]
    print(f"{prediction['image']} shows a {best['class']} ({best['probability']:.0%})")


if __name__ == "__main__":
    main()
