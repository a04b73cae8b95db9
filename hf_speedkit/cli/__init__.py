"""The `hf-speedkit` command, one file per subcommand; heavy imports happen inside the commands."""
