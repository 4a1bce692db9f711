"""`python -m bench.experiments`: see `bench.experiments.run`, which worker processes can import."""

import sys

from bench.experiments.run import main

if __name__ == "__main__":
    sys.exit(main())
