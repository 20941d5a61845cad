"""Follow a training with a callback: stop when the accuracy has not improved for two evaluations.

    python examples/callback.py

A callback is a function of one event; `podscale.runs.events` lists the events.
"""

import podscale


class Patience:
    """Stop a training once the accuracy has not improved for so many evaluations."""

    def __init__(self, evaluations: int) -> None:
        self.best, self.since, self.evaluations = 0.0, 0, evaluations

    def __call__(self, event: podscale.Event) -> bool:
        if event.kind != "eval":
            return False
        self.since = 0 if event.values["accuracy"] > self.best else self.since + 1
        self.best = max(self.best, event.values["accuracy"])
        print(f"epoch {event.epoch:.1f}: {event.values['accuracy']:.1%}, best so far {self.best:.1%}")
        return self.since >= self.evaluations


def main() -> None:
    recipe = podscale.load_recipe("digits").override({"train.epochs": 12, "train.eval_epochs": 1, "model.width": 8})
    patience = Patience(evaluations=2)
    summary = podscale.train(recipe, pod=podscale.find_pod(virtual="1x2"), folder="runs/patient", callbacks=[patience])
    print(f"ended after {summary['steps']} steps; the best accuracy was {patience.best:.1%}")


if __name__ == "__main__":
    main()
