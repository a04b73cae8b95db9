"""`hf-speedkit recipe`: writes a recipe and the files it needs out of the installed package, to run and to change."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

FOLDERS = ("recipes", "accelerate_configs")
_SKIPPED = {"__pycache__"}


def recipe(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Which job; --list names them.")] = None,
    output: Annotated[Path, typer.Option(metavar="DIR", help="Where to write; made if it is not there.")] = Path(),
    force: Annotated[bool, typer.Option("--force", help="Write over files that were changed.")] = False,
    show: Annotated[bool, typer.Option("--list", help="Name the recipes and write nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write a recipe, its settings, the launch files and accelerate's configs into a folder.

    Exit 0: written, or there already and the same. 1: a file there differs. 2: wrong use.
    """
    import json

    source = shipped_files()
    jobs = recipes(source)
    if show:
        lines = [f"{job:<{max(map(len, jobs))}}  {about}" for job, about in jobs.items()]
        typer.echo(json.dumps(jobs) if as_json else "\n".join(lines))
        return
    if name not in jobs:
        said = "no recipe was named" if name is None else f"there is no recipe {name!r}"
        raise typer.BadParameter(f"{said}; there are: {', '.join(jobs)}", param_hint="NAME")
    if output.exists() and not output.is_dir():
        raise typer.BadParameter(f"not a folder: {output}", param_hint="--output")
    written = _write(source, output, force=force)
    command = f"accelerate launch recipes/qwen27b_sft.py --config recipes/{name}.yaml"
    if as_json:
        typer.echo(json.dumps({"output": str(output), "written": written, "command": command}))
        return
    where = "" if output.resolve() == Path.cwd() else f"cd {output} && "
    typer.echo(f"{len(written)} files written to {output}/. Settings: recipes/{name}.yaml. Run it:\n  {where}{command}")


def shipped_files() -> Path:
    """The folder that holds `recipes` and `accelerate_configs`: in the package, or the repository of an editable one.

    The wheel carries them (pyproject.toml, force-include); there is one source, and no copy in the repository.
    """
    package = Path(__file__).resolve().parents[1]
    for place in (package / "shipped", package.parent):
        if all((place / folder).is_dir() for folder in FOLDERS):
            return place
    typer.echo("the recipes are missing from this installation.\nMend it:  pip install --force-reinstall hf-speedkit",
               err=True)  # fmt: skip
    raise typer.Exit(1)


def recipes(source: Path) -> dict[str, str]:
    """Names of the jobs with what each is: the first line of its YAML file."""
    return {
        path.stem: path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
        for path in sorted((source / "recipes").glob("*.yaml"))
    }


def _write(source: Path, output: Path, *, force: bool) -> list[str]:
    """Copy what is missing; returns the names written, relative to `output`."""
    files = [
        path.relative_to(source)
        for folder in FOLDERS
        for path in sorted((source / folder).rglob("*"))
        if path.is_file() and not _SKIPPED & set(path.parts)
    ]
    there = [file for file in files if (output / file).exists()]
    changed = [file for file in there if (output / file).read_bytes() != (source / file).read_bytes()]
    if changed and not force:
        lines = "\n".join(f"  {file}" for file in changed)
        typer.echo(f"nothing was written: these files in {output}/ are not the recipe's own:\n{lines}\n"
                   "Mend it:  --output another folder\nGo on all the same:  --force writes over them",
                   err=True)  # fmt: skip
        raise typer.Exit(1)
    written = [file for file in files if file not in there or file in changed]
    for file in written:
        target = output / file
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((source / file).read_bytes())
        target.chmod((source / file).stat().st_mode & 0o777)
    return [str(file) for file in written]
