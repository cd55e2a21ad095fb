"""`python -m cadence_fx` is the command `cadence`."""

import sys

from cadence_fx.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
