"""Stands in for torchvision where only importing it matters: SGLang does for vision models, and text needs none of it.

torchvision's builds do not load beside a torch for CPU alone. Only the processes of SGLang in the tests have this folder
on their path.
"""

from __future__ import annotations

import sys
from enum import Enum
from importlib.machinery import ModuleSpec
from types import ModuleType

__version__ = "0.0.0"


class InterpolationMode(Enum):
    """The one thing whose members are looked up while others import."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def stand_in(name: str) -> type:
    """What any other name is: a class that does nothing. Special names stay missing, as the import system expects."""
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})


def add_module(path: str) -> None:
    """A module whose every name is a stand-in, where ``import`` and its parent's attributes find it."""
    module = ModuleType(path)
    module.__spec__ = ModuleSpec(path, None)
    vars(module).update(__getattr__=stand_in, InterpolationMode=InterpolationMode)
    parent, _, name = path.rpartition(".")
    setattr(sys.modules[parent], name, module)
    sys.modules[path] = module


for submodule in ("io", "transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional"):
    add_module(f"{__name__}.{submodule}")
