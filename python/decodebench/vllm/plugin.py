"""The connector's name in vLLM: ``"kv_connector": "DecodeBench"`` needs no module path."""

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

__all__ = ["register"]


def register() -> None:
    """Register the connector, once. vLLM calls this in every process unless told not to."""
    if "DecodeBench" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector("DecodeBench", "decodebench.vllm", "DecodeBench")
