"""Write `src/podscale/data/digits.npz` from scikit-learn's copy of the UCI digits.

python tests/support/make_digits.py
"""

from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

FILE = Path(__file__).parents[2] / "src" / "podscale" / "data" / "digits.npz"


def main():
    digits = load_digits()
    np.savez_compressed(FILE, images=digits.images.astype(np.uint8), labels=digits.target.astype(np.uint8))


if __name__ == "__main__":
    main()
