"""A KV connector for vLLM that fills exactly the blocks that a request's external tokens need.

It takes the place of vLLM's own ``DecodeBenchConnector``, under the same names and options::

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "DecodeBenchConnector",
        "kv_connector_module_path": "decodebench.vllm", "kv_role": "kv_both"}'

The scheduler's side plans which blocks to fill and sends the plan; every worker writes it into its
caches before the step's forward pass. Importing this package imports vLLM and torch.
"""

from vllm.version import __version__, __version_tuple__

from decodebench.errors import DecodeBenchError

# The connector interface changes between versions: what is older than this was not tested.
if __version_tuple__[:2] < (0, 30):
    raise DecodeBenchError(f"decodebench.vllm needs vLLM 0.30 or later, found {__version__}")

from decodebench.vllm import plugin
from decodebench.vllm.connector import DecodeBench
from decodebench.vllm.metadata import DecodeBenchConnectorMetadata

__all__ = ["DecodeBench", "DecodeBenchConnector", "DecodeBenchConnectorMetadata"]

DecodeBenchConnector = DecodeBench
plugin.register()
