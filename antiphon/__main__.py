"""``python -m antiphon``: the command line, where the script ``antiphon`` is not on the path."""

from __future__ import annotations

import sys

from antiphon.cli import main

if __name__ == "__main__":
    sys.exit(main())
