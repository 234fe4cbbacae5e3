"""The command line. Commands import what they need when they run, so that ``--help`` is instant."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit.

    0 done, 2 wrong input, 3 stopped by a monitor, 130 interrupted, 1 a fault of ours (with its traceback).
    """
    sys.exit(run(list(sys.argv[1:] if arguments is None else arguments)))


def run(arguments: list[str]) -> int:
    """Run a command; returns its exit code."""
    import os

    import typer

    from trainwright.cli.app import app
    from trainwright.core.errors import TrainwrightError

    try:
        return app(args=arguments, prog_name="trainwright", standalone_mode=False) or 0
    except TrainwrightError as error:
        return _say(error.exit_code, str(error))
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except _usage_errors() as error:
        error.show()
        return error.exit_code
    except BrokenPipeError:  # `trainwright methods | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _usage_errors() -> Any:
    """Base of the errors about wrong arguments: click's, or that of the click which newer versions of typer carry."""
    import typer

    return next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


def _say(code: int, message: str) -> int:
    """One message on stderr; a worker leaves it to its launcher."""
    import os

    from trainwright.parallel import launch

    if launch.launched():
        return launch.report_exit(code, message)
    from trainwright.cli.output import complain

    rank = os.environ.get("RANK", "0")
    complain(code, message if rank == "0" else f"[rank {rank}] {message}")
    return code
