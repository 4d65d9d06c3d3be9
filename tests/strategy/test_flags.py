"""The configuration from files, from argparse and from tyro, and back to TOML."""

from __future__ import annotations

import argparse
import json
import tomllib
from enum import Enum
from pathlib import Path

import attrs
import numpy as np
import pytest
import tyro

from lightrft.errors import ConfigError
from lightrft.strategy.config import DEFAULTS, StrategyConfig, from_dict, to_dict
from lightrft.strategy.flags import add_arguments, dump_toml, field_help, load_config_file, parse_flags


class Colour(Enum):
    RED = "red"


# ---------------------------------------------------------------------------------------------------------- files


def test_C4_a_file_gives_the_config_that_was_written(tmp_path: Path) -> None:
    config = StrategyConfig(seed=3, adam_betas=(0.5, 0.25), backend="local", extra_args={"mine": [1, {"deep": 'é\n"'}]})
    (tmp_path / "c.toml").write_text(dump_toml(to_dict(config)), encoding="utf-8")
    (tmp_path / "c.json").write_text(json.dumps(to_dict(config)), encoding="utf-8-sig")
    for name in ("c.toml", "c.json"):
        assert from_dict(load_config_file(tmp_path / name)) == config


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("bad.toml", "seed = 1\nmax_norm = = 2\n", "line 2"),
        ("twice.toml", "seed = 1\nseed = 2\n", "line 2"),
        ("bad.json", '{"seed": 1,\n "max_norm": }', "line 2"),
        ("twice.json", '{"seed": 1, "seed": 2}', "'seed' is given twice"),
        ("list.json", "[1]", "a configuration is a JSON object, and this is a list"),
        ("other.yaml", "seed: 1", ".toml or .json"),
    ],
)
def test_a_malformed_file_is_an_error_that_names_file_and_line(
    tmp_path: Path, name: str, text: str, complaint: str
) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config_file(path)
    assert str(path) in str(caught.value)
    assert complaint in str(caught.value)


def test_a_file_that_is_missing_or_not_text_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml cannot be read"):
        load_config_file(tmp_path / "absent.toml")
    (tmp_path / "binary.toml").write_bytes(b"a = '\xff\xfe'")
    with pytest.raises(ConfigError, match=r"binary\.toml is not UTF-8"):
        load_config_file(tmp_path / "binary.toml")
    (tmp_path / "directory.toml").mkdir()
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config_file(tmp_path / "directory.toml")


def test_dump_toml_writes_what_toml_can_hold_and_names_what_it_cannot() -> None:
    values = {"path": Path("a"), "pair": (1, 2), "none": None, "colour": Colour.RED, "deep": {"array": np.arange(2)}}
    assert tomllib.loads(dump_toml(values)) == {"path": "a", "pair": [1, 2], "colour": "red", "deep": {"array": [0, 1]}}
    with pytest.raises(ConfigError) as caught:
        dump_toml({"fine": 1, "deep": {"bad": print, "list": [1, None]}, "set": {1}})
    for part in ("deep.bad=", "deep.list[1]=None", "set={1}"):
        assert part in str(caught.value)


# -------------------------------------------------------------------------------------------------------- argparse


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="train", exit_on_error=False)
    add_arguments(made)
    return made


def test_argparse_without_flags_gives_the_defaults() -> None:
    args = parser().parse_args([])
    assert StrategyConfig.from_args(args) == StrategyConfig()
    assert vars(args) == dict(DEFAULTS)


def test_argparse_takes_underscores_and_dashes_and_gives_typed_values() -> None:
    words = "--train_batch_size 64 --no-bf16 --fsdp --adam-betas 0.5 0.25 --grad_accum_dtype fp32 --max-norm 2"
    args = parser().parse_args([*words.split(), "--backend", "None", "--use-kl-loss"])
    assert args.train_batch_size == 64
    assert StrategyConfig.from_args(args) == StrategyConfig(
        train_batch_size=64,
        bf16=False,
        fsdp=True,
        adam_betas=(0.5, 0.25),
        grad_accum_dtype="fp32",
        max_norm=2.0,
        use_kl_loss=True,
    )


@pytest.mark.parametrize(
    "words",
    ["--seed 8.5", "--zero_stage 4", "--engine_type tgi", "--adam_betas 0.5", "--adam_betas 0.5 1.5", "--l2 nan"],
)
def test_argparse_refuses_bad_values(words: str) -> None:
    with pytest.raises((argparse.ArgumentError, SystemExit)):
        parser().parse_args(words.split())


def test_argparse_help_says_what_each_field_is() -> None:
    text = " ".join(parser().format_help().split())
    for name, default in DEFAULTS.items():
        assert f"--{name}" in text
        assert f"--{name.replace('_', '-')}" in text
        assert field_help(StrategyConfig)[name].split()[0] in text
        assert f"(default: {' '.join(map(str, default)) if isinstance(default, tuple) else default})" in text
    assert "{vllm,sglang,hf,scripted}" in text


def test_argparse_leaves_a_flag_that_the_parser_has() -> None:
    own = argparse.ArgumentParser()
    own.add_argument("--seed", type=int, default=7, help="mine")
    add_arguments(own)
    assert own.parse_args([]).seed == 7
    assert own.parse_args(["--max_norm", "3"]).max_norm == 3.0


# ------------------------------------------------------------------------------------------------------------ tyro


@attrs.frozen(kw_only=True)
class Program:
    """A program with settings of its own."""

    steps: int = attrs.field(default=3, validator=attrs.validators.ge(1))
    """How long it goes on."""
    strategy: StrategyConfig = attrs.field(factory=StrategyConfig)
    """Everything below it."""


WORDS = "--seed 7 --no-bf16 --adam-betas 0.5 0.25 --train_batch_size 64 --engine-type hf --grad-accum-dtype None"


def test_tyro_makes_flags_of_every_field() -> None:
    expected = StrategyConfig(seed=7, bf16=False, adam_betas=(0.5, 0.25), train_batch_size=64, engine_type="hf")
    assert parse_flags(StrategyConfig, WORDS.split()) == expected
    assert tyro.cli(StrategyConfig, args=WORDS.split()) == expected
    assert parse_flags(StrategyConfig, []) == StrategyConfig()


def test_tyro_flags_override_a_file_and_keep_its_extra_arguments() -> None:
    of_file = Program(steps=5, strategy=StrategyConfig(max_norm=3.0, extra_args={"mine": {"deep": [1]}}))
    made = parse_flags(Program, ["--strategy.seed", "9"], default=of_file)
    assert made == attrs.evolve(of_file, strategy=attrs.evolve(of_file.strategy, seed=9))


def test_tyro_help_says_what_each_field_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_flags(Program, ["--help"], prog="train")
    assert ended.value.code == 0
    text = capsys.readouterr().out
    words = " ".join(text.replace("│", " ").split())
    for name in DEFAULTS:
        assert f"--strategy.{name.replace('_', '-')}" in words
        assert " ".join(field_help(StrategyConfig)[name].split()[:4]) in words
    assert "extra" not in text


@pytest.mark.parametrize("words", ["--seed 8.5", "--seed -1", "--zero-stage 4", "--engine-type tgi", "--no-such-flag"])
def test_tyro_ends_with_code_2_and_a_message(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_flags(StrategyConfig, words.split())
    assert ended.value.code == 2
    assert words.split()[-1].strip("-") in capsys.readouterr().err
