"""The optional kernels; everything else about the package is in pyproject.toml."""

import sys

from setuptools import Extension, setup

# GCC and Clang vectorise the loops at -O3 only.
flags = ["/O2"] if sys.platform == "win32" else ["-O3", "-std=c99", "-Wall", "-Wextra"]

setup(
    ext_modules=[
        Extension(
            "deltaformat._native",
            ["deltaformat/_native.c"],
            extra_compile_args=flags,
            py_limited_api=True,
            optional=True,  # without a compiler NumPy serves
        )
    ],
    # One wheel per platform, for every Python from 3.11 on.
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
