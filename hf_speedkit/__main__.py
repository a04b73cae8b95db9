"""`python -m hf_speedkit`: the command line, where its script is not on the path."""

from hf_speedkit.cli.main import main

main()
