"""vLLM's plugin entry point: ``"kv_connector": "DecodeBench"`` needs no module path."""

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

__all__ = ["register"]


def register() -> None:
    """Register the connector. vLLM calls this in every process, and may do so again."""
    if "DecodeBench" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(
            "DecodeBench", "decodebench.vllm", "DecodeBenchConnector"
        )
