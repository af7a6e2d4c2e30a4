"""Load an engine as a command does: with a progress bar, and with the checkpoint's warnings on standard error."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from specdec.errors import ConfigError
from specdec.ranks.place import launched_place

if TYPE_CHECKING:
    from specdec.engine import Engine


def load_engine(model: str, settings: Mapping[str, Any], *, console: Console) -> "Engine":
    """Load a checkpoint.

    Args:
        model: A directory or "glm-tiny".
        settings: Arguments of `Engine.from_pretrained`; `engine_settings` makes them of flags.
        console: Standard error; a bar is shown only where that is a terminal.

    Raises:
        ConfigError: A setting is not possible here, or the model is unknown or not implemented.
        CheckpointError: The files are damaged or incomplete.
    """
    flag = "--cp-size" if settings.get("cp_size", 1) > 1 else "--tp-size"
    place, num_ranks = launched_place(), settings.get(flag[2:].replace("-", "_"), 1)
    if place is not None and place.size != num_ranks:
        raise ConfigError(
            f"{flag} is {num_ranks}, but the launcher started {place.size} processes (WORLD_SIZE): start {num_ranks}, "
            f"or give {flag} {place.size} to a command that has it"
        )
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(f"Loading {escape(model)}", total=None)

        from specdec.engine import Engine  # takes seconds, so the bar is there already

        def show(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        engine = Engine.from_pretrained(model, on_progress=show, **settings)
    for warning in engine.checkpoint.report.warnings:
        console.print(f"[yellow]warning:[/yellow] {escape(warning)}", soft_wrap=True)
    return engine
