"""The operator as a process of a test."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import urllib3


class Operator:
    """`python -m rekindle_operator` as a process."""

    def __init__(self, kubeconfig: Path, directory: Path, identity: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.log = directory / f"{identity}.log"
        environment = os.environ | {
            "KUBECONFIG": str(kubeconfig),
            # Where the client puts certificates and keys, which stay after SIGKILL.
            "TMPDIR": str(directory),
            "REKINDLE_HTTP_BIND": "127.0.0.1",
            "REKINDLE_HTTP_PORT": str(self.port),
            "REKINDLE_OPERATOR_IDENTITY": identity,
            "REKINDLE_PRIORITY_CLASS": "default.rekindle-task",
        }
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rekindle_operator"],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def get(self, path: str) -> str:
        try:
            answer = urllib3.request("GET", f"http://127.0.0.1:{self.port}{path}", retries=False)
        except urllib3.exceptions.HTTPError:
            return ""
        return answer.data.decode() if answer.status == 200 else ""

    def leads(self) -> bool:
        return "rekindle_operator_leader 1.0" in self.get("/metrics")

    def errors(self) -> list[str]:
        lines = self.log.read_text().splitlines()
        return [line for line in lines if '"exception"' in line or not line.startswith("{")]

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.kill()
