"""``python -m gemmkit``: see `gemmkit.tools.cli`."""

from gemmkit.tools.cli import main

raise SystemExit(main())
