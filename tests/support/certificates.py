"""Certificates of an authority that lives as long as a test, made by the program `openssl`."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path

from raymq.actors.protocol import tls

#: `openssl x509` knows no end in the past
_CA_RULES = """[ca]
default_ca = rules
[rules]
database = {directory}/index
new_certs_dir = {directory}
default_md = sha256
rand_serial = yes
policy = any
[any]
commonName = supplied
"""
_EC = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


@dataclass(frozen=True)
class Certificates:
    """PEM files: the authority's certificate; a server's, which it signed, and its key."""

    ca: Path
    certificate: Path
    key: Path

    def environment(self) -> dict[str, str]:
        """Ray's variables."""
        return {
            tls.USE_TLS: "1",
            tls.SERVER_CERT: str(self.certificate),
            tls.SERVER_KEY: str(self.key),
            tls.CA_CERT: str(self.ca),
        }


def make_node_certificates(directory: Path) -> Certificates:
    """`make_certificates` for a Ray of this machine: its own ports are at the address that it finds."""
    import ray.util

    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return make_certificates(directory, f"IP:127.0.0.1,IP:{address}")


def make_certificates(
    directory: Path, names: str = "IP:127.0.0.1,DNS:localhost", end: datetime | None = None
) -> Certificates:
    """A new authority and a server's certificate for `names` (a subjectAltName), good until `end` (UTC)."""
    directory.mkdir(parents=True, exist_ok=True)
    made = Certificates(directory / "ca.pem", directory / "server.pem", directory / "server.key")
    ca_key, request, extension = directory / "ca.key", directory / "server.csr", directory / "names"
    extension.write_text(f"subjectAltName={names}\n")

    _openssl(
        *("req", "-x509", *_EC, "-days", "90", "-subj", "/CN=raymq test authority"),
        *("-keyout", str(ca_key), "-out", str(made.ca)),
    )
    _openssl(
        *("req", *_EC, "-subj", "/CN=raymq test shard"),
        *("-keyout", str(made.key), "-out", str(request)),
    )

    until = end or datetime.now(timezone.utc) + timedelta(days=90)
    (directory / "index").touch()
    (directory / "ca.cnf").write_text(_CA_RULES.format(directory=directory))
    _openssl(
        *("ca", "-batch", "-notext", "-config", str(directory / "ca.cnf")),
        *("-cert", str(made.ca), "-keyfile", str(ca_key), "-in", str(request)),
        *("-extfile", str(extension), "-out", str(made.certificate)),
        *("-startdate", _date(until - timedelta(days=365)), "-enddate", _date(until)),
    )
    return made


def _date(at: datetime) -> str:
    return at.strftime("%Y%m%d%H%M%SZ")


def _openssl(*words: str) -> None:
    done = subprocess.run(["openssl", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"openssl {' '.join(words)}: {done.stderr}")
