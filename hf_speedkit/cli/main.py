"""The `hf-speedkit` command.

A subcommand is a function in a module of its own that imports nothing but typer at the top: registering it is cheap,
what it needs is imported when it runs. `hf-speedkit --help` must answer in 0.6 s (tests/test_package.py).
"""

from __future__ import annotations

import errno

import typer

from hf_speedkit.cli.bench import bench
from hf_speedkit.cli.doctor import doctor
from hf_speedkit.cli.export import export
from hf_speedkit.cli.plan import plan
from hf_speedkit.cli.recipe import recipe
from hf_speedkit.cli.report import report
from hf_speedkit.cli.trace import trace

_WRONG_USE = 2
_UNWRITABLE = (errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.EROFS, errno.ENOSPC, errno.EDQUOT)

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Packed, proven and measured fine-tuning.")

# In the order in which a job meets them: --help lists them so.
app.command()(doctor)
app.command()(plan)
app.command()(recipe)
app.command()(bench)
app.command()(report)
app.command()(trace)
app.command()(export)


@app.callback(invoke_without_command=True)
def _root(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        from hf_speedkit import __version__

        typer.echo(__version__)
        raise typer.Exit


def main() -> None:
    """Run the command line; a place that cannot be written to and an unfit package end without a traceback."""
    try:
        app()
    except Exception as error:
        said = _in_words(error)
        if said is None:
            raise
        typer.echo(said, err=True)
        raise SystemExit(_WRONG_USE) from error


def _in_words(error: Exception) -> str | None:
    if isinstance(error, OSError) and error.errno in _UNWRITABLE and error.filename is not None:
        return f"{error.filename}: {error.strerror}\nMend it:  name a place that can be written to"
    from hf_speedkit.core.errors import InstallationError
    from hf_speedkit.trainer.broken_installs import broken_install
    from hf_speedkit.trainer.installed_versions import require_versions

    try:
        require_versions("typer", "rich")
    except InstallationError as stop:
        error = stop
    broken = error if isinstance(error, InstallationError) else broken_install(error)
    return None if broken is None else str(broken)


if __name__ == "__main__":
    main()
