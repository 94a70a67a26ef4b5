"""Engines on the CPU, and what happened in them."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine_models import VOCABULARY
from engine_spy import RECORDS
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

BLOCK = 32
ARGUMENTS: dict[str, Any] = {
    "dtype": "float32",
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "max_model_len": 1024,
    "max_num_seqs": 64,
    "block_size": BLOCK,
    "num_gpu_blocks_override": 400,
    "enable_prefix_caching": True,
}
Prompt = list[int]


def prompt(length: int, seed: int) -> Prompt:
    """Return tokens that no prompt of another seed begins with."""
    return [(seed * 31 + i * (seed % 7 + 1) + i // 5) % VOCABULARY for i in range(length)]


class Engine:
    """An engine, its records so far and requests that run to their end."""

    def __init__(self, llm: LLM, records: Path) -> None:
        self.llm = llm
        self._records = records

    def generate(self, prompts: list[Prompt], num_tokens: int = 6) -> list[list[int]]:
        """Return the tokens generated for each prompt, all of them submitted at once."""
        outputs = self.llm.generate(
            [{"prompt_token_ids": one} for one in prompts], sampling(num_tokens), use_tqdm=False
        )
        return [list(output.outputs[0].token_ids) for output in outputs]

    def records(self, kind: str) -> list[dict[str, Any]]:
        """Return the records of one kind, a process's in its order."""
        return read_records(self._records, kind)

    def admissions(self) -> list[dict[str, Any]]:
        """Return all admissions with external tokens."""
        return [one for step in self.records("step") for one in step["admissions"]]

    def problems(self) -> list[str]:
        """Return what was wrong with any fill."""
        return [one for record in self.records("problem") for one in record["problems"]]

    def statistics(self) -> dict[str, float]:
        """Return the connector's counters, by their names in its statistics."""
        prefix = "vllm:decodebench_"
        return {
            metric.name.removeprefix(prefix): metric.value
            for metric in self.llm.get_metrics()
            if metric.name.startswith(prefix)
        }

    def longest_step(self) -> int:
        """Return the most tokens that a step computed of one request."""
        return max(max(step["tokens"].values(), default=0) for step in self.records("step"))


def read_records(directory: Path, kind: str) -> list[dict[str, Any]]:
    """Return the records of one kind in a folder, a process's in its order."""
    lines = [
        json.loads(line)
        for path in sorted(directory.glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    return [line for line in lines if line["kind"] == kind]


def sampling(num_tokens: int) -> SamplingParams:
    """Return what makes a request's tokens the same in every run."""
    return SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True, detokenize=False)


def transfer(name: str, **options: Any) -> dict[str, Any]:
    """Return the configuration of a connector of ``engine_spy``."""
    return {
        "kv_connector": name,
        "kv_connector_module_path": "engine_spy",
        "kv_role": "kv_both",
        "kv_connector_extra_config": options,
    }


@contextmanager
def run_engine(
    model: Path, records: Path, kv_transfer: dict[str, Any] | None, **arguments: Any
) -> Iterator[Engine]:
    """Run an engine of the model in ``model``, with its records in a new folder."""
    records.mkdir(parents=True)
    os.environ[RECORDS] = str(records)
    llm = LLM(
        **{
            **ARGUMENTS,
            "model": str(model),
            "kv_transfer_config": kv_transfer,
            "disable_log_stats": False,
            **arguments,
        }
    )
    try:
        yield Engine(llm, records)
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()
