"""Which version of a framework is needed, and what to install. Knows nothing of what is done with it."""

from __future__ import annotations

import importlib
from importlib.metadata import version
from types import ModuleType
from typing import NamedTuple

from packaging.version import Version

from autoaccum.errors import MissingExtraError


class Framework(NamedTuple):
    """Of a framework that can be used.

    Attributes:
        distribution: Its name for pip.
        minimum: The oldest version that the tests were run with, or that has what is used.
        older: What breaks with one before that.
        extra: The extra of autoaccum that installs it.
    """

    distribution: str
    minimum: str
    older: str
    extra: str


FRAMEWORKS = {
    "transformers": Framework("transformers", "4.55", "Trainer leaves out the last short window of an epoch", "hf"),
    "accelerate": Framework("accelerate", "0.21", "every end of the data cuts a window short", "accelerate"),
    "lightning": Framework("lightning", "2.4", "it needs pkg_resources, which setuptools has dropped", "lightning"),
    "deepspeed": Framework(
        "deepspeed", "0.19.4", "managed_gradient_accumulation is ignored, and step() counts", "deepspeed"
    ),
}


def framework(name: str) -> ModuleType:
    """The imported framework.

    Raises:
        MissingExtraError: When it is not installed, or older than what is supported; the message has the pip command.

    Example:
        >>> from autoaccum import MissingExtraError
        >>> try:
        ...     version = framework("lightning").__version__
        ... except MissingExtraError as error:
        ...     version = str(error)
    """
    needed = FRAMEWORKS[name]
    remedy = f'Install it: python -m pip install "autoaccum[{needed.extra}]"'
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        if error.name is not None and error.name.split(".")[0] != name:
            raise  # it is there, and what it needs is not: its own message says what
        raise MissingExtraError(f"{name} is not installed. {remedy}") from None
    found = version(needed.distribution)
    if Version(found) < Version(needed.minimum):
        raise MissingExtraError(
            f"{name} {found} is too old; expected {needed.minimum} or newer (before, {needed.older}). {remedy}"
        )
    return module
