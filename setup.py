"""What pyproject.toml cannot say: the folder `examples` is installed as the package `gemmkit_examples`, for `gemmkit demo`.

It is a package of its own, not one of gemmkit's: the examples are written as a user's code, and gemmkit's own is compiled
and emulated by other rules. (`examples` would be too common a name among installed packages.)
"""

from setuptools import find_packages, setup

setup(packages=[*find_packages(include=["gemmkit", "gemmkit.*"]), "gemmkit_examples"],
      package_dir={"gemmkit_examples": "examples"})
