"""Reads Secret blocks of the Prefect server, once at the start of a run. Knows nothing of their use."""

from millrace.connectors.prefect.server import ensure_server, ui_url
from millrace.core.contracts.references import remedy
from millrace.core.errors import ConfigError


def read_secret(block: str, where: str) -> str:
    """The text in a Secret block. Starts the local server if none is configured. `where` is the field that refers to the block.

    Raises ConfigError if the block does not exist or holds no text, or if the server does not answer.
    """
    url = ensure_server()
    import httpx
    from prefect.client.orchestration import get_client
    from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError

    try:
        with get_client(sync_client=True) as client:
            value = client.read_block_document_by_name(block, "secret").data.get("value")
    except ObjectNotFound:
        reason = f"the Prefect server at {ui_url(url)} has no Secret block {block}"
        raise ConfigError(reason, where=where, remedy=remedy(f"prefect:{block}")) from None
    except (
        httpx.HTTPError,
        PrefectHTTPStatusError,
        RuntimeError,
    ) as error:  # RuntimeError: no server answers
        raise ConfigError(
            f"the Prefect server at {ui_url(url)} does not tell the Secret block {block} ({type(error).__name__})",
            where=where,
            remedy="see that the server runs and that PREFECT_API_AUTH_STRING or PREFECT_API_KEY lets you in",
        ) from None
    if not isinstance(value, str) or not value:
        raise ConfigError(
            f"the Secret block {block} holds no text",
            where=where,
            remedy="save text in it, a block for each secret",
        )
    return value
