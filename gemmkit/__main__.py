"""``python -m gemmkit``: see `gemmkit.cli`."""

from gemmkit.cli import main

raise SystemExit(main())
