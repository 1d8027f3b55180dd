"""List the packages; everything else is declared in pyproject.toml.

The folder kernels/ is at the top of the repository and is imported as deeploop.kernels.
"""

from setuptools import find_packages, setup

inside_kernels = [f"deeploop.kernels.{name}" for name in find_packages("kernels")]
setup(
    packages=[*find_packages(include=["deeploop*"]), "deeploop.kernels", *inside_kernels],
    package_dir={"deeploop.kernels": "kernels"},
    package_data={"deeploop": ["py.typed"]},
)
