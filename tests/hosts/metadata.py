"""The page on which a cloud tells a machine about itself, as `python -m tests.hosts.metadata FILE`.

It answers as AWS' does, on the address that only the machine itself sees. While FILE is not there,
the machine is to stay; then it ends at the time that FILE says.
"""

from __future__ import annotations

import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

ADDRESS = "169.254.169.254"
TOKEN = "a-token"


class Page(BaseHTTPRequestHandler):
    """Two paths: one that gives tokens, and one that wants one of them."""

    def do_PUT(self) -> None:
        found = self.path == "/latest/api/token"
        self._answer(TOKEN if found else None)

    def do_GET(self) -> None:
        may = self.headers["X-aws-ec2-metadata-token"] == TOKEN
        file = Path(sys.argv[1])
        is_there = self.path == "/latest/meta-data/spot/instance-action" and file.exists()
        said = f'{{"action": "terminate", "time": "{file.read_text()}"}}' if is_there else None
        self._answer(said if may else None)

    def _answer(self, text: str | None) -> None:
        self.send_response(404 if text is None else 200)
        self.end_headers()
        self.wfile.write((text or "").encode())


if __name__ == "__main__":
    subprocess.run(["ip", "address", "add", f"{ADDRESS}/32", "dev", "lo"], check=True)
    server = HTTPServer((ADDRESS, 80), Page)
    print("ready", flush=True)
    server.serve_forever()
