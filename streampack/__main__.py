"""``python -m streampack``: the `streampack` command."""

import sys

from streampack.cli import main

if __name__ == "__main__":
    sys.exit(main())
