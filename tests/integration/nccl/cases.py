"""The cases of the suite: what each group of ranks computes, and which case of one process it must agree with."""

from dataclasses import asdict, dataclass, field
from typing import Any

TEN_STEPS = {"model.width": 8, "train.epochs": 0.84, "train.eval_epochs": 1}  # of 128 of 1,437 images
THREE_EPOCHS = {"model.width": 8, "train.epochs": 3, "train.eval_epochs": 1}
STRATEGIES = ("xla", "ring", "ring2", "torus", "torus4", "swing", "swing_latency", "sharded")
# The largest difference that rounding may make: of losses, relatively, and of arrays, relative to their largest value.
TOLERANCES = {"float64": 1e-9, "float32": 1e-4}


@dataclass(frozen=True)
class Case:
    """One case of one group.

    Attributes:
        name: unique.
        ranks: of the group that runs it.
        kind: a function of the rank program.
        shape: of the pod.
        precision: of the model.
        recipe: fields of the recipe digits.
        options: of the plan.
        like: the case that it must agree with; empty: its result says itself whether it is right.
        run: the case whose folder it resumes; empty: it has a folder of its own.
        stops: whether it stops at its first evaluation.
    """

    name: str
    ranks: int
    kind: str = "train"
    shape: str = "2x2"
    precision: str = "float64"
    recipe: dict[str, Any] = field(default_factory=lambda: TEN_STEPS)
    options: dict[str, Any] = field(default_factory=dict)
    like: str = ""
    run: str = ""
    stops: bool = False

    def to_message(self, folder):
        """Return it as the rank program reads it."""
        return asdict(self) | {"folder": str(folder / (self.run or self.name)).replace(" ", "-")}


def _one(name, **fields):
    return Case(name, 1, shape="1x1", **fields)


def _four(name, like, **fields):
    return Case(name, 4, like=like, **fields)


WIDE = TEN_STEPS | {"batch.span": 128}
MUON = TEN_STEPS | {"optimizer.name": "muon", "schedule.peak": 0.05}

# The same training in bfloat16, with its sums in another order: how far rounding moves it.
ROUNDED = ("bfloat16", "bfloat16 in two micro-batches")

REFERENCES = [
    _one("float64"),
    _one("float64, groups of 128", recipe=WIDE),
    _one("float64, Muon", recipe=MUON),
    _one("float32", precision="float32"),
    *(_one(name, precision="bfloat16", options={"micro_batches": n}) for n, name in enumerate(ROUNDED, start=1)),
    _one("fused layers in float32", kind="fused", precision="float32"),
    _one("fused layers in bfloat16", kind="fused", precision="bfloat16"),
    _one("three epochs", recipe=THREE_EPOCHS),
]
FOUR_RANKS = [
    _four("sums of every strategy and payload", "", kind="sums"),
    *(_four(f"{name} in float64", "float64", options={"summation": name, "check_steps": 5}) for name in STRATEGIES),
    _four("three epochs, the first on 4 ranks", "", recipe=THREE_EPOCHS, options={"summation": "sharded"}, stops=True),
    _four("tiles of 2x1", "float64", shape="4x1"),
    _four("tiles of 2x2", "float64, groups of 128", recipe=WIDE),
    _four("two micro-batches, tiles of 2x2", "float64", options={"micro_batches": 2}),
    _four("Muon", "float64, Muon", recipe=MUON, options={"summation": "torus"}),
    _four("sharded Muon", "float64, Muon", recipe=MUON, options={"summation": "sharded"}),
    _four("torus4 in float32", "float32", precision="float32", options={"summation": "torus4"}),
    _four("sharded in float32", "float32", precision="float32", options={"summation": "sharded"}),
    _four("torus in bfloat16", "bfloat16", precision="bfloat16", options={"summation": "torus"}),
    _four("bfloat16 payload", "float32", precision="float32", options={"summation": "ring2", "payload": "bfloat16"}),
    _four("torus4, bfloat16", "float32", precision="float32", options={"summation": "torus4", "payload": "bfloat16"}),
    _four("fused layers over tiles", "fused layers in bfloat16", kind="fused", precision="bfloat16"),
    _four("bench sum", "", kind="bench", precision="float32"),
]
FIRST, SECOND = "three epochs, the first on 4 ranks", "the second on 2 ranks"
TWO_RANKS = [
    Case("two ranks in float64", 2, shape="1x2", like="float64", options={"summation": "torus"}),
    Case(SECOND, 2, shape="2x1", recipe=THREE_EPOCHS, options={"summation": "sharded"}, run=FIRST, stops=True),
]
LAST = [_one("the third on 1 rank", recipe=THREE_EPOCHS, like="three epochs", run=FIRST)]
GROUPS = {1: [*REFERENCES, *LAST], 2: TWO_RANKS, 4: FOUR_RANKS}
AFTER = {SECOND: FIRST, LAST[0].name: SECOND}  # cases that resume what another group has started
# What differs by the rounding of bfloat16 is compared with what that rounding does to one process: how far these
# trainings are from that one.
NOISE = {
    "torus in bfloat16": (ROUNDED, "float32"),
    "bfloat16 payload": (ROUNDED, "float32"),
    "torus4, bfloat16": (ROUNDED, "float32"),
    "fused layers over tiles": (("fused layers in bfloat16",), "fused layers in float32"),
}
