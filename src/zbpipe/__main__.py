"""`python -m zbpipe` is the `zbpipe` command."""

from zbpipe.cli import main

main()
