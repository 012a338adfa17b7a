"""Flags that are made from the settings of a command."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from osd_hf.cli.arguments import flag, in_groups, part, read_arguments
from osd_hf.cli.flags import Reporting, Settings
from osd_hf.errors import ConfigError

(_models,) = in_groups("models")


@dataclass(frozen=True)
class Sizes:
    count: int = field(default=5, metadata={"help": "how many"})
    bound: int | None = field(default=None, metadata={"help": "at most"})
    gate: bool = field(default=True, metadata={"help": "checked"})
    kind: Literal["a", "b"] = field(default="a", metadata={"help": "which"})


@dataclass(frozen=True, kw_only=True)
class Base(Settings):
    device: str | None = _models("where")


@dataclass(frozen=True, kw_only=True)
class Command(Base, Reporting):
    place: Path = flag("where to", positional=True, metavar="DIR")
    store: list[Path] = flag("what from", required=True)
    target_name: str | None = _models("which model")
    rate: float = flag("how fast", 0.5)
    dry: bool = flag("nothing is done", False, rivals="how")
    wet: bool = flag("all is done", False, rivals="how")
    dtype: Literal["auto", "float32"] = _models("how exact", "auto")
    sizes: Sizes = part(metavar="X")


def parsed(*arguments: str) -> Command:
    return read_arguments(Command, arguments, prog="osd-hf try")


def test_what_is_not_given_has_its_default() -> None:
    expected: dict[str, Any] = {"place": Path("here"), "store": [Path("s")], "sizes": Sizes()}
    assert parsed("here", "--store", "s") == Command(**expected)


def test_names_and_types_make_the_flags() -> None:
    given = parsed(
        "here", "--store", "s", "--store", "t", "--target-name", "m", "--rate", "2", "--dry", "--dtype", "float32",
        "--count", "7", "--bound", "9", "--no-gate", "--kind", "b", "--device", "cpu", "--json", "-",
    )  # fmt: skip
    assert given == Command(
        place=Path("here"), store=[Path("s"), Path("t")], target_name="m", rate=2.0, dry=True, dtype="float32",
        device="cpu", json="-", sizes=Sizes(7, 9, False, "b"),
    )  # fmt: skip
    assert parsed("here", "--store", "s", "--bound", "none").sizes.bound is None


@dataclass(frozen=True, kw_only=True)
class Several(Settings):
    first: str = flag("one", positional=True, metavar="ONE")
    others: list[Path] = flag("several", positional=True, metavar="OTHER")


def test_a_list_without_a_name_takes_all_that_follows(capsys: pytest.CaptureFixture[str]) -> None:
    def given(*arguments: str) -> Several:
        return read_arguments(Several, arguments, prog="osd-hf try")

    expected = Several(first="a", others=[Path("b"), Path("c")])
    assert given("a", "b", "c") == given("--others", "b", "--others", "c", "a") == expected
    assert given("--first", "a", "b", "c") == expected
    for few in ((), ("a",)):
        with pytest.raises(SystemExit):
            given(*few)
    assert "[--NAME VALUE ...] ONE OTHER ..." in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [["here"], ["--store", "s"], ["--dry", "--wet"], ["--dtype", "int8"], ["--rate", "x"], ["--kind", "c"]],
)
def test_bad_usage_ends_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    whole = ["here", "--store", "s"] if arguments not in (["here"], ["--store", "s"]) else []
    with pytest.raises(SystemExit) as ended:
        parsed(*whole, *arguments)
    assert ended.value.code == 2


def test_flags_stand_in_their_groups_and_inherited_ones_come_last(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--help")
    shown = capsys.readouterr().out
    models = shown[shown.index("models:") :]
    assert models.index("--target-name") < models.index("--dtype") < models.index("--device")
    assert "--store" not in models
    assert "How many (default: 5)." in shown
    assert "At most (default: none)." in shown
    assert "Checked (default: yes)." in shown


def test_checks_name_the_flag() -> None:
    given = parsed("here", "--store", "s", "--rate", "-1", "--target-name", "m")
    with pytest.raises(ConfigError, match=r"--rate must be at least 1, got -1\.0"):
        given.check_counts("rate", "device")
    with pytest.raises(ConfigError, match=r"--rate must not be negative, got -1\.0"):
        given.check_not_negative("rate")
    with pytest.raises(ConfigError, match="--device and --json go together"):
        parsed("here", "--store", "s", "--json", "-").check_together("device", "json")
