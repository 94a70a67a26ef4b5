"""A whole vLLM engine with the connector, with the in-tree one, and without; run where vLLM is.

Requests are submitted together. The first decode step begins when the KV of every one of them is
there: the connector has returned, or the last prompt is computed. The three engines, processes of
their own on made-up weights, take turns, and the connectors' tokens are compared first.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

VOCABULARY: Final = 128
TRANSFERS: Final[dict[str, dict[str, Any] | None]] = {
    "prefill": None,
    "in-tree": {"kv_connector": "DecodeBenchConnector", "kv_role": "kv_both"},
    "decodebench": {
        "kv_connector": "DecodeBenchConnector",
        "kv_connector_module_path": "decodebench.vllm",
        "kv_role": "kv_both",
    },
}


@dataclass(frozen=True)
class Load:
    """What one round submits, and to which model."""

    num_requests: int
    num_tokens: int
    num_steps: int
    num_layers: int

    def model(self) -> dict[str, Any]:
        """The model as a Hugging Face configuration: 512 bytes of KV a token and layer."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "num_hidden_layers": self.num_layers,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 2 * (self.num_tokens + self.num_steps),
            "torch_dtype": "float32",
        }


@dataclass(frozen=True)
class Round:
    """What one engine did in one round; seconds, the first two since the requests arrived."""

    first_step: float
    first_tokens: float
    steps: list[float]
    tokens: list[list[int]]


def serve(pipe: Connection, model: str, transfer: dict[str, Any] | None, load: Load) -> None:
    """Run an engine, and a round of it for each number that arrives, the last is None."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm.entrypoints.llm import LLM

    llm = LLM(
        model=model,
        dtype="float32",
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        enable_prefix_caching=False,
        block_size=32,  # What attention on a CPU takes.
        max_model_len=load.num_tokens + load.num_steps + 16,
        max_num_seqs=load.num_requests,
        kv_transfer_config=transfer,
    )
    pipe.send(None)
    while (seed := pipe.recv()) is not None:
        pipe.send(run_round(llm.llm_engine, load, seed))
    llm.llm_engine.engine_core.shutdown()


def run_round(engine: Any, load: Load, seed: int) -> Round:
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
    from vllm.sampling_params import SamplingParams

    sampling = SamplingParams(
        max_tokens=load.num_steps + 1, temperature=0, ignore_eos=True, detokenize=False
    )
    for number in range(load.num_requests):
        first = seed * load.num_requests + number
        prompt = [(first * 31 + i * (first % 7 + 1)) % VOCABULARY for i in range(load.num_tokens)]
        engine.add_request(f"{number}", {"prompt_token_ids": prompt}, sampling)
    tokens: dict[str, list[int]] = {}
    steps: list[float] = []
    loaded: list[float] = []
    if has_kv_transfer_group():
        connector = get_kv_transfer_group()
        load_kv = type(connector).start_load_kv

        def timed(*args: Any, **kwargs: Any) -> None:
            load_kv(connector, *args, **kwargs)
            loaded.append(time.perf_counter())

        connector.start_load_kv = timed
    start = time.perf_counter()
    while engine.has_unfinished_requests():
        before = time.perf_counter()
        complete = len(tokens) == load.num_requests
        outputs = engine.step()
        after = time.perf_counter()
        for output in outputs:
            tokens[output.request_id] = list(output.outputs[0].token_ids)
        # Prompts that are computed one after the other also end one after the other.
        if complete and len(outputs) == load.num_requests:
            steps.append(after - before)
        elif not complete and len(tokens) == load.num_requests:
            first_step, first_tokens = loaded[-1] if loaded else after, after
    return Round(
        first_step - start,
        first_tokens - start,
        steps,
        [tokens[f"{i}"] for i in range(load.num_requests)],
    )


def measure(load: Load, num_rounds: int) -> dict[str, list[Round]]:
    """Run every engine in turn, after one round each that is not counted."""
    context = multiprocessing.get_context("spawn")
    rounds: dict[str, list[Round]] = {name: [] for name in TRANSFERS}
    with tempfile.TemporaryDirectory() as model, ExitStack() as stack:
        Path(model, "config.json").write_text(json.dumps(load.model()))
        pipes: dict[str, Any] = {}
        for name, transfer in TRANSFERS.items():
            pipe, other = context.Pipe()
            pipes[name] = stack.enter_context(closing(pipe))
            process = context.Process(target=serve, args=(other, model, transfer, load))
            process.start()
            # Then a process that ends in an error also ends the pipe.
            other.close()
            stack.callback(process.join)
            pipe.recv()
        for seed in range(num_rounds + 1):
            for name, pipe in pipes.items():
                pipe.send(seed)
                rounds[name].append(pipe.recv())
        for pipe in pipes.values():
            pipe.send(None)
    check(rounds, load)
    return {name: one[1:] for name, one in rounds.items()}


def check(rounds: dict[str, list[Round]], load: Load) -> None:
    for one, other in zip(rounds["in-tree"], rounds["decodebench"], strict=True):
        assert one.tokens == other.tokens
        # A prompt that was computed at all would have taken steps before the first token.
        assert len(one.steps) == len(other.steps) == load.num_steps
    assert all(one.steps for one in rounds["prefill"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fast", action="store_true", help="little of everything, once")
    fast = parser.parse_args().fast
    load = Load(2, 40, 3, 1) if fast else Load(16, 4000, 64, 8)
    rounds = measure(load, 1 if fast else 7)
    size = load.num_requests * load.num_tokens * load.num_layers * 512
    print(
        f"{load.num_requests} requests of {load.num_tokens} tokens, {load.num_layers} layers, "
        f"{size / 1e9:.2f} GB of KV"
    )
    columns: list[tuple[str, str, Callable[[Round], list[float]]]] = [
        ("until it begins", "in-tree", lambda one: [one.first_step]),
        ("until its tokens", "in-tree", lambda one: [one.first_tokens]),
        ("a later step", "prefill", lambda one: one.steps),
    ]
    print("The first decode step, ratios to the in-tree class; a later one, to a real prefill.")
    print(f"{'':<14}" + "".join(f"{title:>26}" for title, _, _ in columns))
    medians = {
        name: [
            statistics.median(value for one in some for value in seconds(one))
            for _, _, seconds in columns
        ]
        for name, some in rounds.items()
    }
    for name, row in medians.items():
        cells = (
            f"{own * 1e3:13.2f} ms {own / medians[base][number]:8.3f}x"
            for number, (own, (_, base, _)) in enumerate(zip(row, columns, strict=True))
        )
        print(f"  {name:<12}" + "".join(cells))


if __name__ == "__main__":
    main()
