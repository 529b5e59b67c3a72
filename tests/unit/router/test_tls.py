"""What is wrong with the files of TLS is said before anything starts."""

from __future__ import annotations

import subprocess

import pytest

from core.config import RouterConfig
from core.errors import ConfigError
from router.tls import read_tls
from tests.support.certificates import Authority


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Paths by name, good and bad."""
    folder = tmp_path_factory.mktemp("certificates")
    authority = Authority(folder)
    cert, key = authority.issue("server")
    (folder / "text").write_text("not PEM")
    secret = folder / "secret.key"
    words = ["openssl", "pkey", "-in", key, "-aes128", "-passout", "pass:x", "-out", secret]
    subprocess.run(words, check=True, capture_output=True)
    return {
        "cert": cert,
        "key": key,
        "ca": authority.pem,
        "other": authority.key,
        "text": folder / "text",
        "secret": secret,
        "absent": folder / "absent",
    }


def config(files, cert: str, key: str, ca: str = "") -> RouterConfig:
    return RouterConfig(
        tls_cert=str(files[cert]),
        tls_key=str(files[key]),
        tls_client_ca=str(files[ca]) if ca else "",
    )


def test_without_files_there_is_no_tls():
    assert read_tls(RouterConfig()) is None


def test_files_that_fit_together(files):
    tls = read_tls(config(files, "cert", "key", "ca"))
    assert tls is not None
    assert tls.cert.startswith(b"-----BEGIN CERTIFICATE")


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("absent", "key"), r"router\.tls_cert: cannot read .*absent: No such file"),
        (("cert", "absent"), r"router\.tls_key: cannot read .*absent: No such file"),
        (("cert", "key", "absent"), r"router\.tls_client_ca: cannot read .*absent"),
        (("text", "key"), r"router\.tls_cert: .*text has no certificate in PEM form"),
        (("cert", "key", "text"), r"router\.tls_client_ca: .*text has no certificate"),
        (("cert", "text"), r"router\.tls_key: .*text is not a private key in PEM form"),
        (("cert", "secret"), r"router\.tls_key: .*secret\.key is not .*without a passphrase"),
        (("cert", "other"), r"router\.tls_key: .*ca\.key is not the key of .*server\.pem"),
    ],
)
def test_what_is_wrong_names_the_key_and_the_file(files, names, words):
    with pytest.raises(ConfigError, match=f"^{words}"):
        read_tls(config(files, *names))
