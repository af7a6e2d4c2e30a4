"""Command options from tables: each option is named, typed and explained in one place, and commands share tables."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.markup import escape

from specdec.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class TableOption:
    """One option.

    Attributes:
        name: The flag is `--` and the name with dashes.
        type: What a value is: int, float, str, a Literal, a list of these for a flag that may be repeated, or bool for
            a flag without a value.
        help: One sentence for `--help`.
        metavar: What `--help` shows in the place of a value; None shows the type.
        parse: From what the command line held to the value; raises `ConfigError`. None leaves it.
        switches_off: A bool that is true by default: the flag is `--no-` and the name, and gives False.
        aliases: Other flags for the same.
        sets: Key under which a command receives the value; None is the name. Of options that set the same one is given.
    """

    name: str
    type: Any
    help: str
    metavar: str | None = None
    parse: Callable[[Any], Any] | None = None
    switches_off: bool = False
    aliases: tuple[str, ...] = ()
    sets: str | None = None

    @property
    def key(self) -> str:
        """Key under which a command receives the value."""
        return self.sets or self.name

    @property
    def flag(self) -> str:
        """The flag as one types it."""
        return ("--no-" if self.switches_off else "--") + self.name.replace("_", "-")

    def parameter(self, panel: str) -> inspect.Parameter:
        """Give the parameter that makes typer offer the option; its value is None or [] where it is not given."""
        metavar = " " if self.type is bool else self.metavar  # typer would show a type
        option = typer.Option(
            self.flag,
            *self.aliases,
            help=escape(self.help),  # typer reads help as markup, and a bracket is none
            metavar=metavar,
            show_default=False,
            rich_help_panel=panel,
        )
        annotation = Annotated[self.type | None, option]  # type: ignore[name-defined]  # a type known at run time only
        return inspect.Parameter(self.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)

    def read(self, value: Any) -> Any:
        """Give the value of what the command line held."""
        if self.switches_off:
            return not value
        return value if self.parse is None else self.parse(value)


@dataclass(frozen=True, slots=True)
class OptionTable:
    """Options that belong together.

    Attributes:
        title: Heading in `--help`.
        options: The options, in the order of `--help`.
    """

    title: str
    options: Sequence[TableOption]


Command = Callable[..., None]


def takes_options(**tables: Sequence[OptionTable]) -> Callable[[Command], Command]:
    """Give a command the options of tables.

    Args:
        **tables: By parameter of the command; it receives a dict of the options that were given, and only those.
    """

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def wrapper(**values: Any) -> None:
            for parameter, group in tables.items():
                values[parameter] = _take_given(group, values)
            command(**values)

        own = inspect.signature(command).parameters.values()
        offered = [parameter for parameter in own if parameter.name not in tables]
        for group in tables.values():
            offered += [option.parameter(table.title) for table in group for option in table.options]
        kinds = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in offered]
        wrapper.__signature__ = inspect.Signature(kinds)  # type: ignore[attr-defined]  # typer reads it
        return wrapper

    return decorate


def _take_given(tables: Sequence[OptionTable], values: dict[str, Any]) -> Mapping[str, Any]:
    """Move the options of tables out of `values`, leaving out those that were not given."""
    given: dict[str, Any] = {}
    flag_by_key: dict[str, str] = {}
    for table in tables:
        for option in table.options:
            value = values.pop(option.name)
            if value is None or value == []:
                continue
            if option.key in flag_by_key:
                raise ConfigError(f"{flag_by_key[option.key]} and {option.flag} exclude each other: give one of them")
            flag_by_key[option.key] = option.flag
            given[option.key] = option.read(value)
    return given
