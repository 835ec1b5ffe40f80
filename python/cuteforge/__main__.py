"""`python -m cuteforge`: see `cuteforge.cli`."""

import sys

from cuteforge.cli import main

if __name__ == "__main__":
    sys.exit(main())
