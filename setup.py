"""The optional kernels and the conformance suite; everything else about the package is in pyproject.toml."""

import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_py import build_py

# GCC and Clang vectorise the loops at -O3 only.
flags = ["/O2"] if sys.platform == "win32" else ["-O3", "-std=c99", "-Wall", "-Wextra"]


class BuildPy(build_py):
    """Puts the suite into wheels, for `deltaformat conformance run`; a checkout has it beside the package."""

    def run(self) -> None:
        """Build, and copy."""
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib) / "deltaformat" / "_conformance"
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree("conformance", target, ignore=shutil.ignore_patterns("__pycache__", "cases"))
            # Thousands of small files that have much in common: one archive of a fraction of their size.
            shutil.make_archive(str(target / "cases"), "xztar", "conformance", "cases")


setup(
    cmdclass={"build_py": BuildPy},
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
