"""What engines can do, to read: the table in docs/engines.md is made of these lines."""

from __future__ import annotations

from attrs import asdict, fields

from lightrft.engines.protocol import Capabilities

HEADINGS = {
    "sleep": "gives memory back",
    "weight_update": "takes weights",
    "shares_weights": "is the trainer's model",
    "multimodal": "images",
    "tensor_parallel": "shared by ranks",
    "seeds": "heeds seeds",
}


def heading() -> str:
    """The first two lines of the table, in Markdown."""
    names = [HEADINGS[each.name] for each in fields(Capabilities)]
    return f"| engine | {' | '.join(names)} |\n|{'---|' * (len(names) + 1)}"


def line(name: str, capabilities: Capabilities) -> str:
    """The line of an engine."""
    return f"| {name} | {' | '.join('yes' if can else 'no' for can in asdict(capabilities).values())} |"
