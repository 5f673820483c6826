"""The command `cptrace`: the list of its verbs, and the one place where errors become exit codes."""

from __future__ import annotations

import errno
import sys
from importlib import import_module
from typing import Final, NamedTuple, NoReturn

import click

from cptrace import __version__
from cptrace.cli.settings import CONTEXT_SETTINGS, INTERRUPTED
from cptrace.errors import CptraceError, RenderError

_USAGE: Final = 2
# What a full disk, a broken device and a closed descriptor say; anything else is no matter of the output.
_OUTPUT_ERRORS: Final = (errno.ENOSPC, errno.EIO, errno.EBADF, errno.EDQUOT)


class Verb(NamedTuple):
    """One subcommand; its module is imported only when it is used."""

    name: str
    module: str
    summary: str


VERBS: Final[tuple[Verb, ...]] = (
    Verb("analyze", "cptrace.cli.analyze", "Explain where the time of a trace goes."),
    Verb(
        "compare", "cptrace.cli.compare", "Say what differs between runs, and whether it is more than noise."
    ),
    Verb(
        "doctor", "cptrace.cli.doctor", "Say what is here to run and record with, and how to mend what lacks."
    ),
    Verb(
        "explain", "cptrace.cli.explain", "Say what a finding means, how it is detected and how to mend it."
    ),
    Verb("export", "cptrace.cli.export", "Write a trace in the format of another tool."),
    Verb("run", "cptrace.cli.run", "Run an instrumented context-parallel scheme, record it, explain it."),
    Verb("schemes", "cptrace.cli.schemes", "List the schemes that `run` knows."),
    Verb(
        "whatif", "cptrace.cli.whatif", "Predict step times with findings mended, or other links and devices."
    ),
)


class _Verbs(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return [verb.name for verb in VERBS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        for verb in VERBS:
            if verb.name == cmd_name:
                command = getattr(import_module(verb.module), verb.name)
                assert isinstance(command, click.Command)
                return command
        return None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            known = ", ".join(verb.name for verb in VERBS)
            raise click.UsageError(f"there is no command {args[0]!r}; the commands are: {known}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(verb.name, verb.summary) for verb in VERBS])


@click.command(cls=_Verbs, context_settings=CONTEXT_SETTINGS)
@click.version_option(__version__, prog_name="cptrace")
def cli() -> None:
    """Where context-parallel training time goes, from Nsight Systems traces.

    Exit codes: 0 done, 2 usage, 3 file cannot be read as a trace or has no device work, 4 trace contradicts itself,
    5 output cannot be written, 6 run failed, 10 a condition of --fail-on or --fail-if holds, 130 interrupted. A trace
    in which something could not be told is no error: the report says what, why and what to record.
    """


def main() -> NoReturn:
    """Run the command line and exit with its code; no traceback for what a user can cause."""
    try:
        cli.main(standalone_mode=False)
    except CptraceError as error:
        _fail(str(error), error.exit_code)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        sys.exit(_USAGE)
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        hint = f"; see `{context.command_path} --help`" if context is not None else ""
        _fail(error.format_message().rstrip(".") + hint, _USAGE)
    except OSError as error:
        if error.errno not in _OUTPUT_ERRORS:
            raise
        _fail(f"cannot write to standard output: {error.strerror}", RenderError.exit_code)
    except (click.Abort, KeyboardInterrupt):
        _fail("interrupted", INTERRUPTED)
    sys.exit(0)


def _fail(message: str, exit_code: int) -> NoReturn:
    click.echo(f"cptrace: {' '.join(message.split())}", err=True)
    sys.exit(exit_code)
