"""The sub-commands of `vrl`, a module each with `main(arguments) -> exit code`."""
