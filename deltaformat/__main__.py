"""`python -m deltaformat`: the command line."""

import sys

from deltaformat.cli import main

if __name__ == "__main__":
    sys.exit(main())
