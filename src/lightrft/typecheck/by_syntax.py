"""What no type shows: operations that not all ranks reach, results that are dropped, strategies without a type."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from lightrft.typecheck.findings import Finding, Source, finding_at

MEETINGS = frozenset(
    {"all_gather", "all_reduce", "backward", "barrier", "broadcast", "gather_and_generate", "get_grad_norm"}
    | {"load_ckpt", "moving_average", "optimizer_step", "prepare", "prepare_models_and_optimizers", "save_ckpt"}
    | {"save_model", "setup_distributed", "update_engine_weights"}
)
"""The operations in which ranks meet."""
ONLY_RESULTS = frozenset({"all_gather", "all_reduce", "broadcast"})
"""The operations that do nothing but give a result: their input is never changed (law G1)."""
Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
INNER = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
EXITS = (ast.Return, ast.Continue, ast.Break)


def within(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """All nodes in the order of the source, without what runs at another time."""
    for node in nodes:
        yield node
        if not isinstance(node, INNER):
            yield from within(ast.iter_child_nodes(node))


def dotted(node: ast.AST) -> str | None:
    """``self.strategy`` as text; None for anything that is no name."""
    if isinstance(node, ast.Name):
        return node.id
    base = dotted(node.value) if isinstance(node, ast.Attribute) else None
    return f"{base}.{node.attr}" if base is not None and isinstance(node, ast.Attribute) else None


def called(node: ast.AST, names: Collection[str]) -> tuple[str, str] | None:
    """``("self.strategy", "barrier")`` for ``self.strategy.barrier(...)``, if that is one of ``names``."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in names:
        owner = dotted(node.func.value)
        return None if owner is None else (owner, node.func.attr)
    return None


def decided_by(test: ast.expr, aliases: Mapping[str, str]) -> str | None:
    """The strategy whose rank decides ``test``: ``s.is_rank_0()``, ``s.get_rank() == ...``, their opposites, or a
    name that holds one of them."""
    for node in within([test]):
        if found := called(node, ("is_rank_0", "get_rank")):
            return found[0]
        if isinstance(node, ast.Name) and node.id in aliases:
            return aliases[node.id]
    return None


def rank_aliases(body: Sequence[ast.stmt]) -> dict[str, str]:
    """Names that are set once in a function, to this rank or to whether it is the first."""
    names = [node for node in within(body) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    often = Counter(node.id for node in names)
    return {
        node.targets[0].id: owner
        for node in within(body)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and often[node.targets[0].id] == 1
        if isinstance(node.value, ast.Call | ast.Compare) and (owner := decided_by(node.value, {}))
        if called(node.value, ("is_rank_0", "get_rank")) or isinstance(node.value, ast.Compare)
    }


def meetings(nodes: Iterable[ast.AST], owner: str) -> list[tuple[str, ast.Call]]:
    """The operations of ``owner`` in which ranks meet."""
    found = ((called(node, MEETINGS), node) for node in within(nodes))
    return [(name[1], node) for name, node in found if name and name[0] == owner and isinstance(node, ast.Call)]


def rank_findings(source: Source) -> Iterator[Finding]:
    """Operations in which ranks meet, on a path that only some ranks take.

    Conservative: only where the rank is asked of the same name (``if strategy.is_rank_0(): strategy.save_ckpt(...)``),
    in one function, and only those that the other path has not as well. An early ``return``, ``continue`` or ``break``
    counts: what follows it in its block is the other path. Not seen: a rank from elsewhere (``dist.get_rank()``), calls
    in other functions, conditions on data that differs between ranks. The wrapper ``checked`` finds those, in a run.
    """
    bodies = [node.body for node in ast.walk(source.tree) if isinstance(node, ast.Module | Function)]
    for body in bodies:
        aliases = rank_aliases(body)
        for owner, one, other in branches(body, aliases):
            for mine, theirs in ((one, other), (other, one)):
                elsewhere = Counter(name for name, _ in meetings(theirs, owner))
                for name, node in meetings(mine, owner):
                    elsewhere[name] -= 1
                    if elsewhere[name] < 0:
                        yield finding_at(
                            source,
                            node,
                            "on some ranks only",
                            "rank-only",
                            f"{owner}.{name} waits for all ranks, and only some of them come here",
                            f"Call {name} on every rank: before or after the test of the rank. Saving included: each "
                            "rank has its part, and files are written once.",
                        )


Paths: TypeAlias = tuple[str, list[ast.AST], list[ast.AST]]
"""The strategy whose rank decides, and what runs on each side of it."""


def branches(body: Sequence[ast.stmt], aliases: Mapping[str, str]) -> Iterator[Paths]:
    """Everywhere in a function that ranks part."""
    for place, statement in enumerate(body):
        if isinstance(statement, INNER):
            continue
        rest = list(body[place + 1 :])
        if isinstance(statement, ast.If) and (owner := decided_by(statement.test, aliases)):
            one, other = list(statement.body), list(statement.orelse)
            if isinstance(one[-1], EXITS):
                yield owner, [*one], [*other, *rest]
            elif other and isinstance(other[-1], EXITS):
                yield owner, [*one, *rest], [*other]
            else:
                yield owner, [*one], [*other]
        for node in within(header(statement)):
            if isinstance(node, ast.IfExp) and (owner := decided_by(node.test, aliases)):
                yield owner, [node.body], [node.orelse]
            if isinstance(node, ast.BoolOp):
                deciding = (i for i, value in enumerate(node.values[:-1]) if decided_by(value, aliases))
                if (first := next(deciding, None)) is not None:
                    yield decided_by(node.values[first], aliases) or "", [*node.values[first + 1 :]], []
        for block in blocks(statement):
            yield from branches(block, aliases)


def blocks(statement: ast.AST) -> Iterator[list[ast.stmt]]:
    """The blocks of a compound statement."""
    for name in ("body", "orelse", "finalbody"):
        if block := getattr(statement, name, None):
            yield block
    for part in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
        yield part.body


def header(statement: ast.stmt) -> list[ast.AST]:
    """The expressions of a statement outside its blocks."""
    return [node for node in ast.iter_child_nodes(statement) if isinstance(node, ast.expr | ast.withitem)]


def dropped_findings(source: Source) -> Iterator[Finding]:
    """Collectives whose result nobody takes, on a name that ends in ``strategy``: the input is not changed."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Expr) and (found := called(node.value, ONLY_RESULTS)):
            owner, name = found
            if owner.split(".")[-1].endswith("strategy"):
                yield finding_at(
                    source,
                    node.value,
                    "result dropped",
                    "unused-result",
                    f"The result of {owner}.{name} is dropped, and its input is never changed",
                    f"Take it: value = {owner}.{name}(value). To wait for all ranks alone, use barrier().",
                )


def unannotated_findings(source: Source) -> Iterator[Finding]:
    """Parameters named ``strategy`` that have no type: what is called on them is anything to mypy."""
    for node in ast.walk(source.tree):
        if isinstance(node, Function):
            for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
                type_ = None if each.annotation is None else ast.unparse(each.annotation)
                if each.arg == "strategy" and type_ in (None, "Any", "typing.Any"):
                    yield finding_at(
                        source,
                        each,
                        "not annotated",
                        "unannotated",
                        f"nothing that {node.name} calls on its parameter 'strategy' could be checked",
                        "Annotate it: strategy: Strategy (from lightrft import Strategy).",
                    )
