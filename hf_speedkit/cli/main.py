"""The `hf-speedkit` command. Subcommands are registered by name and imported only when they run."""

from __future__ import annotations

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Packed, proven and measured fine-tuning.")


@app.callback(invoke_without_command=True)
def _root(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        from hf_speedkit import __version__

        typer.echo(__version__)
        raise typer.Exit


def main() -> None:
    """Run the command line."""
    app()
