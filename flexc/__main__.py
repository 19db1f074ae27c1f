"""`python -m flexc`: see flexc/cli.py."""

from flexc.cli import main

main()
