"""The native decoder. All else about the package is in pyproject.toml.

The extension is optional: where there is no C compiler or no libjpeg-turbo, the package installs without it and decodes
with Pillow. One build serves every Python from 3.11 on (the stable ABI).
"""

from glob import glob

from setuptools import Extension, setup

SOURCES = sorted(set(glob("native/*.c")) - {"native/fuzz.c"})

setup(
    ext_modules=[
        Extension(
            "podscale.data._native",
            sources=SOURCES,
            depends=sorted(glob("native/*.h")),
            libraries=["jpeg"],
            # Contracted multiply-adds would round the weights of the resize in another way than Pillow does.
            extra_compile_args=["-std=c11", "-O3", "-Wall", "-Wextra", "-ffp-contract=off", "-pthread"],
            extra_link_args=["-pthread"],
            py_limited_api=True,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
