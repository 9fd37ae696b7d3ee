"""``python -m hvdcompress``: the same as the ``hvdcompress`` command."""

from hvdcompress.cli import main

main()
