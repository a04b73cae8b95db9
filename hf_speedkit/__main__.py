"""The `hf-speedkit` command, also as `python -m hf_speedkit` where its script is not on the path."""

from __future__ import annotations


def main() -> None:
    """Run the command line; what it is made of and is not installed is told without a traceback."""
    try:
        from hf_speedkit.cli.main import main as run
    except ImportError as error:
        from hf_speedkit.trainer.broken_installs import broken_install

        broken = broken_install(error)
        if broken is None:
            raise
        raise SystemExit(str(broken)) from error
    run()


if __name__ == "__main__":
    main()
