"""``python -m elasticd``: the ``elasticd`` command."""

from elasticd.cli.begin import main

main()
