"""Write ``gen/`` from ``antiphon.proto``: ``python -m router.rpc.generate``, or ``make proto``.

The generated code is checked in, so that neither an installation nor a wheel needs the compiler.
A style test fails when it is not what this script would write.
"""

from __future__ import annotations

import sys
from importlib import resources
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
PACKAGE = "router/rpc/gen"


def write(root: Path) -> None:
    """Write the package below ``root``; raises RuntimeError when the compiler refuses the file."""
    from grpc_tools import protoc  # a development tool, not there where the router serves

    arguments = (
        "protoc",
        # imports in generated code follow the path of the .proto: it appears inside the package
        f"-I{PACKAGE}={FOLDER}",
        f"-I{resources.files('grpc_tools') / '_proto'}",
        f"--python_out={root}",
        f"--pyi_out={root}",
        f"--grpc_python_out={root}",
        f"{PACKAGE}/antiphon.proto",
    )
    if protoc.main(arguments) != 0:
        raise RuntimeError(f"protoc refused {FOLDER / 'antiphon.proto'}")


def main() -> int:
    """Write the package where it belongs."""
    write(ROOT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
