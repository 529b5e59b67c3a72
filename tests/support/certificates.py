"""Certificates for tests, made by the openssl command: an authority, a server, a client."""

from __future__ import annotations

import subprocess
from pathlib import Path

_EC = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")


class Authority:
    """Signs certificates; ``pem`` is what others believe it by."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder = folder
        self.pem, self.key = self._paths(name)
        usage = "keyUsage=critical,keyCertSign,cRLSign"
        _openssl(*_EC, "-keyout", self.key, "-out", self.pem, "-subj", f"/CN={name}",
                 "-addext", usage)  # fmt: skip

    def issue(self, name: str) -> tuple[Path, Path]:
        """Certificate and key of a server on 127.0.0.1, or of a client."""
        cert, key = self._paths(name)
        _openssl(*_EC, "-keyout", key, "-out", cert, "-subj", f"/CN={name}",
                 "-CA", self.pem, "-CAkey", self.key,
                 "-addext", "subjectAltName=IP:127.0.0.1",
                 "-addext", "basicConstraints=critical,CA:FALSE",
                 "-addext", "authorityKeyIdentifier=keyid")  # fmt: skip
        return cert, key

    def _paths(self, name: str) -> tuple[Path, Path]:
        return self._folder / f"{name}.pem", self._folder / f"{name}.key"


def _openssl(*words: str | Path) -> None:
    done = subprocess.run(
        ["openssl", "req", "-x509", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
