"""``lightrft check``: what is found in a trainer, what is left alone, and what it says of bad input."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from attrs import fields_dict, frozen

from lightrft.errors import ConfigError, MissingDependency
from lightrft.strategy.record import StrategyRecord
from lightrft.typecheck import CheckReport, Finding, Kind, by_mypy, by_syntax, check_files, sources
from lightrft.wrappers.checked import COMPARED
from lightrft.wrappers.operations import OPERATIONS

HEADER = """from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

import lightrft
from lightrft import Engine, Sampling, Strategy, StrategyConfig, get_strategy

def trainer(strategy: Strategy, model: nn.Linear, optimizer: Optimizer, loss: Tensor, engine: Engine) -> None:
"""


@frozen
class Case:
    """Statements of a trainer; the last one is at fault, or, without a ``kind``, nothing is."""

    name: str
    body: str
    kind: Kind | None = None
    says: str = ""
    """Is in the suggestion."""


WRONG = [
    Case("import_misspelt", "from lightrft import get_stratgy", "unknown name", "'get_strategy'"),
    Case("operation_misspelt", "strategy.optimiser_step(optimizer, model)", "unknown name", "'optimizer_step'"),
    Case("operation_by_part_of_its_name", "strategy.generate(None)", "unknown name", "'gather_and_generate'"),
    Case("operation_unknown", "strategy.xyzzy()", "unknown name", "help()"),
    Case("fact_misspelt", "print(strategy.worldsize)", "unknown name", "'world_size'"),
    Case("keyword_misspelt", "strategy.create_optimizer(model, weight_decoy=0.1)", "unknown name", "'weight_decay'"),
    Case("keyword_of_operation", "strategy.save_ckpt(model, 'd', max_number=3)", "unknown name", "'max_num'"),
    Case("field_misspelt", "print(StrategyConfig(max_nrm=1.0))", "unknown name", "'max_norm'"),
    Case("field_read_misspelt", "print(strategy.config.zero_stge)", "unknown name", "'zero_stage'"),
    Case("sampling_misspelt", "print(Sampling(max_tokens=3))", "unknown name", "'max_new_tokens'"),
    Case("module_misspelt", "import lightrft.strategies", "unknown name", "'Strategy'"),
    Case(
        "completion_misspelt", "for c in strategy.gather_and_generate(None): c.output_ids", "unknown name", "'output_t"
    ),
    Case("argument_missing", "strategy.backward(loss, model)", "wrong arguments", "optimizer: Optimizer, **kwargs"),
    Case("argument_type", "strategy.backward(1.0, model, optimizer)", "wrong arguments", "(loss: Tensor, model"),
    Case("arguments_swapped", "strategy.optimizer_step(model, optimizer)", "wrong arguments", "name: str = 'model'"),
    Case("overload", "print(strategy.all_reduce(loss, op='avg'))", "wrong arguments", "'mean', 'sum', 'max' or 'min'"),
    Case("field_type", "print(StrategyConfig(seed='x'))", "wrong arguments", "help(lightrft.StrategyConfig)"),
    Case(
        "field_literal", "print(StrategyConfig(kl_estimator='k4'))", "wrong arguments", "help(lightrft.StrategyConfig)"
    ),
    Case("prepare_text", "model = strategy.prepare('model')", "wrong arguments", "(model, optimizer, scheduler)"),
    Case("prepare_swapped", "strategy.prepare((optimizer, model))", "wrong arguments", "(model, optimizer, scheduler)"),
    Case(
        "engine_unchecked",
        "strategy.setup_inference_engine(None).flush_cache()",
        "optional not checked",
        "engine is None",
    ),
    Case(
        "norm_unchecked",
        "outcome = strategy.optimizer_step(optimizer, model)\n    print(outcome.grad_norm > 1.0)",
        "optional not checked",
        "grad_norm is None between updates",
    ),
    Case(
        "norm_returned",
        "norm: float = strategy.optimizer_step(optimizer, model).grad_norm",
        "optional not checked",
        "grad_norm is None between updates",
    ),
    Case(
        "logprobs_unchecked",
        "for c in strategy.gather_and_generate(None): sum(c.logprobs)",
        "optional not checked",
        "logprobs is None",
    ),
    Case("result_type", "number: float = strategy.all_reduce(loss)", "wrong type of a result", "convert it"),
    Case("result_passed_on", "len(strategy.all_reduce(1.0))", "wrong type of a result", "convert it"),
    Case("result_indexed", "strategy.gather_and_generate(None)[0]['text']", "wrong type of a result", "convert it"),
    Case("never_called", "if strategy.is_rank_0: print(1)", "never called", "write is_rank_0()"),
    Case("never_called_compared", "print(strategy.get_rank == 0)", "never called", "write get_rank()"),
    Case("read_only", "strategy.seed = 3", "read-only", "attrs.evolve"),
    Case("in_untyped_function", "def untyped(a): get_strategy().stepp(a)", "unknown name", ""),
    Case("rank_only", "if strategy.is_rank_0(): strategy.save_ckpt(model, 'd')", "on some ranks only", "every rank"),
    Case("rank_only_number", "if strategy.get_rank() == 0: strategy.barrier()", "on some ranks only", "every rank"),
    Case("rank_only_both", "if loss.numel() and strategy.is_rank_0(): strategy.barrier()", "on some ranks only", ""),
    Case("rank_only_opposite", "if not strategy.is_rank_0(): strategy.barrier()", "on some ranks only", "barrier"),
    Case(
        "rank_only_expression", "x = strategy.all_reduce(loss) if strategy.is_rank_0() else loss", "on some ranks only"
    ),
    Case("rank_only_and", "strategy.is_rank_0() and strategy.barrier()", "on some ranks only"),
    Case("rank_only_or", "print(strategy.get_rank() != 0 or strategy.get_grad_norm(model))", "on some ranks only"),
    Case(
        "rank_only_alias",
        "first = strategy.is_rank_0()\n    if first: strategy.save_model(model, None, 'd')",
        "on some ranks only",
    ),
    Case(
        "rank_only_number_alias",
        "rank = strategy.get_rank()\n    if rank > 0: strategy.barrier()",
        "on some ranks only",
    ),
    Case(
        "rank_only_after_return",
        "if not strategy.is_rank_0():\n        return\n    strategy.save_ckpt(model, 'd')",
        "on some ranks only",
    ),
    Case(
        "rank_only_after_continue",
        "for _ in range(3):\n        if strategy.get_rank(): continue\n        strategy.barrier()",
        "on some ranks only",
    ),
    Case(
        "rank_only_else",
        "if strategy.is_rank_0():\n        print(1)\n    else:\n        strategy.barrier()",
        "on some ranks only",
    ),
    Case(
        "rank_only_once_too_often",
        "if strategy.is_rank_0():\n        strategy.barrier()\n        print(1)\n    else:\n"
        "        strategy.barrier()\n        strategy.barrier()",
        "on some ranks only",
    ),
    Case(
        "rank_only_nested",
        "with open('f'):\n        try:\n            print()\n        except OSError:\n"
        "            if strategy.is_rank_0(): strategy.barrier()",
        "on some ranks only",
    ),
    Case("dropped", "strategy.all_reduce(loss)", "result dropped", "value = strategy.all_reduce(value)"),
    Case("not_annotated", "def step(strategy): strategy.anything()", "not annotated", "strategy: Strategy"),
    Case(
        "annotated_any", "def step(strategy: Any) -> None: strategy.anything()", "not annotated", "strategy: Strategy"
    ),
]

RIGHT = [
    Case("plain", "strategy.backward(loss, model, optimizer)\n    strategy.optimizer_step(optimizer, model)"),
    Case("prepared", "model, optimizer = strategy.prepare((model, optimizer))\n    print(model.in_features)"),
    Case("engine_checked", "e = strategy.setup_inference_engine(None)\n    if e is not None: e.flush_cache()"),
    Case("saved_by_all", "strategy.save_ckpt(model, 'd')\n    if strategy.is_rank_0(): print(strategy.world_size)"),
    Case("same_on_both", "if strategy.is_rank_0(): strategy.barrier()\n    else: strategy.barrier()"),
    Case(
        "same_after_return",
        "if strategy.is_rank_0():\n        strategy.barrier()\n        return\n    strategy.barrier()",
    ),
    Case("another_name", "other = get_strategy()\n    if other.is_rank_0(): strategy.barrier()"),
    Case("another_condition", "if strategy.world_size > 1: strategy.barrier()"),
    Case("defined_only", "if strategy.is_rank_0():\n        def later() -> None: strategy.barrier()"),
    Case("set_again", "first = strategy.is_rank_0()\n    first = True\n    if first: strategy.barrier()"),
    Case(
        "value_of_all",
        "all_first = strategy.all_reduce(float(strategy.is_rank_0()))\n    if all_first: strategy.barrier()",
    ),
    Case("same_in_expression", "x = strategy.broadcast(loss if strategy.is_rank_0() else loss * 0)"),
    Case("ignored", "if strategy.is_rank_0(): strategy.barrier()  # lightrft: ignore"),
    Case("ignored_by_mypy", "strategy.seed = 3  # type: ignore[misc]"),
    Case("of_another_library", "class Group:\n        def all_reduce(self) -> None: ...\n    Group().all_reduce()"),
    Case("not_ours", "print('a' + 1, undefined, strategy.all_reduce(undefined))"),
    Case("not_ours_untyped", "def untyped(a): return 'a' + 1"),
]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of mypy's: it reads torch once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def trainers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file for each case, beside a configuration of mypy's that would hide everything."""
    directory = tmp_path_factory.mktemp("trainers")
    for case in [*WRONG, *RIGHT]:
        (directory / f"{case.name}.py").write_text(f"{HEADER}    {case.body}\n")
    (directory / "mypy.ini").write_text("[mypy]\nignore_errors = True\n")
    for name in ("a", "b"):
        (directory / name).mkdir()
        (directory / name / "train.py").write_text("from lightrft import get_strategy\nget_strategy().stepp()\n")
    hidden = directory / ".venv" / "lib"
    hidden.mkdir(parents=True)
    (hidden / "broken.py").write_text("def (")
    return directory


@pytest.fixture(scope="module")
def report(trainers: Path, cache: Path) -> CheckReport:
    """Of all cases, by one run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(trainers)
        return check_files([trainers], cache_dir=cache)


def of_file(report: CheckReport, name: str) -> Sequence[Finding]:
    return [finding for finding in report.findings if finding.path.name == f"{name}.py"]


@pytest.mark.parametrize("case", WRONG, ids=lambda case: case.name)
def test_what_is_wrong_is_found(report: CheckReport, case: Case) -> None:
    findings = of_file(report, case.name)
    last = len(f"{HEADER}    {case.body}".splitlines())
    assert {(finding.kind, finding.line) for finding in findings} == {(case.kind, last)}
    assert all(case.says in finding.suggestion for finding in findings)
    assert all(finding.fails == (case.kind != "not annotated") for finding in findings)


@pytest.mark.parametrize("case", RIGHT, ids=lambda case: case.name)
def test_what_is_right_is_left_alone(report: CheckReport, case: Case) -> None:
    assert of_file(report, case.name) == []


def test_every_kind_of_finding_has_a_case() -> None:
    from typing import get_args

    assert {case.kind for case in WRONG} == {*get_args(Kind)} - {"other"}


def test_errors_of_the_users_own_are_counted_and_not_shown(report: CheckReport) -> None:
    assert report.others == 3
    assert "3 other mypy errors are not about lightrft" in str(report)
    assert "undefined" not in str(report)


def test_files_of_one_name_in_two_directories_are_both_checked(report: CheckReport, trainers: Path) -> None:
    assert [finding.path.parent for finding in of_file(report, "train")] == [trainers / "a", trainers / "b"]


def test_hidden_directories_are_no_part_of_a_directory(report: CheckReport) -> None:
    assert report.files == len(WRONG) + len(RIGHT) + 2


def test_a_report_says_where_what_and_what_to_do(report: CheckReport, trainers: Path) -> None:
    assert report.exit_code == 1
    assert (
        f'{trainers}/operation_misspelt.py:{len(HEADER.splitlines()) + 1}:5: error: "Strategy" has no attribute '
        "\"optimiser_step\" [attr-defined]\n    Did you mean 'optimizer_step'?" in str(report)
    )


def test_a_corrected_file_is_clean_and_notes_alone_do_not_fail(tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("from lightrft import get_strategy\nget_strategy().stepp()\n")
    assert check_files([file], cache_dir=cache).exit_code == 1
    file.write_text("from lightrft import get_strategy\nget_strategy().barrier()\ndef f(strategy): strategy.stepp()\n")
    again = check_files([file], cache_dir=cache)
    assert [finding.kind for finding in again.findings] == ["not annotated"]
    assert (again.exit_code, again.others) == (0, 0)


def test_the_examples_pass(cache: Path) -> None:
    examples = check_files([Path(__file__).parents[1] / "examples"], cache_dir=cache)
    assert (examples.findings, examples.others) == ((), 0)
    assert examples.files >= 2


def test_a_package_is_found_by_its_name_and_not_imported(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "their_trainer" / "inner"
    package.mkdir(parents=True)
    for file in (package.parent / "__init__.py", package / "__init__.py"):
        file.write_text("raise SystemExit('imported')\n")
    (package / "loop.py").write_text("from lightrft import get_strategy\nget_strategy().stepp()\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = check_files(["their_trainer.inner"], cache_dir=cache)
    assert [finding.path for finding in found.findings] == [package / "loop.py"]
    assert sources.files_of("their_trainer.inner.loop") == [package / "loop.py"]
    assert "their_trainer" not in sys.modules


def test_the_operations_that_are_explained_are_those_that_there_are() -> None:
    assert sorted(by_mypy.operations()) == sorted(OPERATIONS)
    assert {*COMPARED, "setup_distributed"} == by_syntax.MEETINGS
    assert set(OPERATIONS) >= by_syntax.MEETINGS | by_syntax.ONLY_RESULTS | set(by_mypy.OVERLOADED)
    assert set(by_mypy.members_of("StrategyRecord")) >= set(fields_dict(StrategyRecord))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_an_operation_takes_is_said_in_words(operation: str) -> None:
    taken = by_mypy.parameters_of(operation)
    assert "self" not in taken
    assert "empty" not in taken
    assert "kwds" not in taken


# ------------------------------------------------------------------------------------------------- both checkers' own files

TYPING = Path(__file__).parent / "typing"


def operations_called(file: Path, *marks: str) -> set[str]:
    """The operations that a file calls on ``strategy``, on lines that hold all of ``marks``."""
    text = file.read_text()
    lines = text.splitlines()
    calls = [node.func for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    return {
        call.attr
        for call in calls
        if isinstance(call, ast.Attribute) and ast.unparse(call.value) == "strategy"
        if all(mark in lines[call.lineno - 1] for mark in marks)
    }


def test_every_operation_has_a_line_that_both_checkers_accept() -> None:
    assert set(OPERATIONS) - operations_called(TYPING / "accepts.py") == set()
    assert "ignore" not in (TYPING / "accepts.py").read_text()


def test_every_operation_has_a_line_that_both_checkers_reject() -> None:
    marks = ("# type: ignore[", "# pyright: ignore[")
    assert set(OPERATIONS) - operations_called(TYPING / "rejects.py", *marks) == set()


# ------------------------------------------------------------------------------------------------------------ bad input


def test_a_path_that_does_not_exist_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.py' is no file, no directory and no package"):
        check_files([tmp_path / "nowhere.py"])


def test_a_directory_without_python_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no Python files"):
        check_files([tmp_path])


def test_all_syntax_errors_are_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("def (\n")
    (tmp_path / "two.py").write_text("x = \n")
    with pytest.raises(ConfigError, match=r"(?s)one\.py:1.*two\.py:1.*Mend these first"):
        check_files([tmp_path])


def test_a_file_with_null_bytes_is_said(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_bytes(b"x = 1\0\n")
    with pytest.raises(ConfigError, match=r"one\.py"):
        check_files([tmp_path])


def test_without_mypy_the_install_line_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def find_spec(name: str) -> ModuleSpec | None:
        return None

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    with pytest.raises(MissingDependency, match=r"lightrft\[check\]"):
        check_files([tmp_path])


def test_where_mypy_itself_gives_up_its_words_are_passed_on(tmp_path: Path) -> None:
    (tmp_path / "has-a-dash").mkdir()
    (tmp_path / "has-a-dash" / "__init__.py").write_text("")
    with pytest.raises(ConfigError, match=r"(?s)mypy could not check.*has-a-dash"):
        check_files([tmp_path], cache_dir=tmp_path / "cache")
