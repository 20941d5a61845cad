"""The native extensions. All else about the package is in pyproject.toml.

Both are optional: where there is no C compiler or no libjpeg-turbo, the package installs without them and decodes with
Pillow. One build serves every Python from 3.11 on (the stable ABI).
"""

import sys
from glob import glob

from setuptools import Extension, setup

FLAGS = ["-std=c11", "-Wall", "-Wextra"]

decoder = Extension(
    "podscale.data._native",
    sources=sorted(set(glob("native/decoder/*.c")) - {"native/decoder/fuzz.c"}),
    depends=sorted(glob("native/decoder/*.h")),
    libraries=["jpeg"],
    # Contracted multiply-adds would round the weights of the resize in another way than Pillow does.
    extra_compile_args=[*FLAGS, "-O3", "-ffp-contract=off", "-pthread"],
    extra_link_args=["-pthread"],
    py_limited_api=True,
    optional=True,
)
abort_message = Extension(
    "podscale.processes._abort",
    sources=["native/abort/abort_message.c"],
    extra_compile_args=FLAGS,
    py_limited_api=True,
    optional=True,
)

setup(
    ext_modules=[decoder, *([abort_message] if sys.platform == "linux" else [])],  # it reads ELF program headers
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
