"""Certificates that live as long as a test.

Covers: a root, a server's and a client's certificate, made by openssl. Does not cover:
checks.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

__all__ = ["make"]


def make(folder: Path) -> None:
    """Writes ca.pem, and server and client, each with .pem and .key.

    other.key belongs to none of them, and locked.key is the server's with a password.
    """
    if not shutil.which("openssl"):
        pytest.skip("openssl is not installed (apt-get install openssl)")
    for name in ("ca", "server", "client", "other"):
        _openssl(
            folder, "ecparam", "-genkey", "-name", "prime256v1", "-out", f"{name}.key"
        )
    _openssl(folder, "req", "-x509", "-key", "ca.key", "-out", "ca.pem", "-days", "2",
             "-subj", "/CN=root of a test")  # fmt: skip
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    for name in ("server", "client"):
        _openssl(folder, "req", "-new", "-key", f"{name}.key", "-out", f"{name}.csr",
                 "-subj", f"/CN={name}")  # fmt: skip
        _openssl(folder, "x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem",
                 "-CAkey", "ca.key", "-CAcreateserial", "-out", f"{name}.pem",
                 "-days", "2", "-extfile", "names")  # fmt: skip
    _openssl(folder, "pkey", "-in", "server.key", "-aes256", "-passout", "pass:secret",
             "-out", "locked.key")  # fmt: skip


def _openssl(folder: Path, *words: str) -> None:
    done = subprocess.run(
        ["openssl", *words], cwd=folder, text=True, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
