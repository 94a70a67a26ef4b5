"""The HTTP server, with concurrent clients."""

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

pytest.importorskip("vllm.v1", reason="vLLM is not installed")

from engine_models import write_model
from engine_run import ARGUMENTS, BLOCK, Prompt, prompt, read_records, run_engine, transfer
from engine_spy import RECORDS
from prometheus_client.parser import text_string_to_metric_families

NUM_CLIENTS = 16
PROMPTS = [prompt(20 + 11 * i, 1 + i) for i in range(40)]


class Server:
    """A server in a process group of its own, and what it printed."""

    def __init__(self, process: "subprocess.Popen[str]", url: str) -> None:
        self.process = process
        self.url = url
        self.output = ""

    def read_until(self, text: str) -> None:
        """Read what the server prints up to a line that holds ``text``."""
        for line in self.process.stdout:
            self.output += line
            if text in line:
                return
        raise AssertionError(f"the server ended without {text!r}:\n{self.output}")

    def connect(self) -> None:
        """Return when the server listens, which is a moment after it says that it has started."""
        address = urlsplit(self.url)
        while self.process.poll() is None:
            with suppress(ConnectionRefusedError):
                socket.create_connection((address.hostname, address.port)).close()
                return
        raise AssertionError(f"the server ended:\n{self.output}")

    def complete(self, tokens: Prompt) -> list[int]:
        """Return the tokens generated for a prompt."""
        body = {
            "prompt": tokens,
            "max_tokens": 6,
            "temperature": 0,
            "ignore_eos": True,
            "detokenize": False,
            "return_token_ids": True,
        }
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as response:
            answer = json.load(response)
        return list(answer["choices"][0]["token_ids"])

    def metrics(self) -> dict[str, float]:
        """Return the connector's counters."""
        with urllib.request.urlopen(f"{self.url}/metrics") as response:
            text = response.read().decode()
        return {
            sample.name: sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name.startswith("vllm:decodebench_") and sample.name.endswith("_total")
        }


@contextmanager
def run_server(model: Path, records: Path, kv_transfer: dict[str, Any]) -> Iterator[Server]:
    records.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = {**ARGUMENTS, "model": model, "host": "127.0.0.1", "port": port}
    arguments["kv_transfer_config"] = json.dumps(kv_transfer)
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    for name, value in arguments.items():
        option = f"--{name.replace('_', '-')}"
        command += [option] if value is True else [option, str(value)]
    process = subprocess.Popen(
        command,
        env={
            **os.environ,
            RECORDS: str(records),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_LOGGING_LEVEL": "INFO",
            "VLLM_LOG_STATS_INTERVAL": "1",
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    server = Server(process, f"http://127.0.0.1:{port}")
    try:
        server.read_until("Application startup complete")
        server.connect()
        yield server
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


def test_a_server_under_concurrent_clients(tmp_path: Path) -> None:
    dense = write_model("dense", tmp_path)
    with run_engine(dense, tmp_path / "alone", transfer("Ours")) as engine:
        alone = engine.generate(PROMPTS)
    records = tmp_path / "server"
    with run_server(dense, records, transfer("Ours", fill_mean=0.015)) as server:
        assert (
            "Filling KV caches of 400 blocks with mean 0.015, std 0, seed 0: group 0: "
            f"2 x (positional of {BLOCK} tokens a block, float32, 16384 bytes a block)"
        ) in server.output
        with ThreadPoolExecutor(NUM_CLIENTS) as clients:
            assert list(clients.map(server.complete, PROMPTS)) == alone
        server.read_until("KV Transfer metrics: num_requests=")

        fills = read_records(records, "fill")
        steps = read_records(records, "step")
        assert read_records(records, "problem") == []
        assert max(max(step["tokens"].values(), default=0) for step in steps) == 1
        counted = server.metrics()
        prefix = "vllm:decodebench_"
        assert counted.pop(f"{prefix}plan_seconds_total") > 0
        assert counted.pop(f"{prefix}fill_seconds_total") > 0
        assert counted == {
            f"{prefix}num_requests_total": len(PROMPTS),
            f"{prefix}num_tokens_total": sum(len(one) - 1 for one in PROMPTS),
            f"{prefix}num_blocks_total": sum(-(-(len(one) - 1) // BLOCK) for one in PROMPTS),
            f"{prefix}num_repeats_merged_total": 0,
            f"{prefix}num_fills_total": len(fills),
            f"{prefix}num_bytes_total": sum(fill["num_bytes"] for fill in fills),
        }

        server.process.send_signal(signal.SIGINT)
        # Its processes share this pipe, which ends with the last of them.
        rest = server.process.stdout.read()
        assert server.process.wait() == 0
        assert "Application shutdown complete" in rest
        assert "decodebench/vllm/" not in rest, "a traceback through the connector"
