"""What forms the bytes of a page: pages are shared only where all of it is equal."""

from __future__ import annotations

from typing import Any

from moonpool.connectors.checkpoint import fingerprint_of, layout_facts


def engine_prefix(arguments: Any, version: str) -> str:
    """The beginning of the names of all pages of engines that serve this model with these settings.

    ``arguments``: SGLang's ``ServerArgs``. Raises ``ConfigError``: the checkpoint cannot be read.
    """
    names = ("dtype", "kv_cache_dtype", "quantization", "quantization_param_path")
    facts = {"sglang": version} | {name: getattr(arguments, name, None) for name in names}
    of_layout = layout_facts(arguments.model_path, str(arguments.revision), facts)
    return f"sglang/{fingerprint_of(of_layout).hex()}"


def pool_name(name: str, pool: Any, engine: Any, *, is_replicated: bool, more: str = "") -> str:
    """The part of the names of pages that stands for one pool of one rank.

    ``pool``: SGLang's host pool; ``engine``: ``HiCacheStorageConfig``. ``is_replicated``: every rank has the
    same bytes, so that one copy serves all. ``more``: how a page is stored.
    """
    facts = {
        "pool": f"{name} {type(pool).__name__} {getattr(pool, 'storage_format_tag', None)}",
        "layout": f"{pool.layout} {pool.page_size} {getattr(pool, 'dtype', None)} {more}",
        "layers": f"{getattr(pool, 'start_layer', '')}-{getattr(pool, 'end_layer', '')}",
        "tp": "any" if is_replicated else f"{engine.tp_rank}/{engine.tp_size}",
        "pp": f"{engine.pp_rank}/{engine.pp_size}",
        "cp": f"{engine.attn_cp_rank}/{engine.attn_cp_size}",
        "dcp": f"{engine.dcp_rank}/{engine.dcp_size}",
    }
    return f"{name}-{fingerprint_of(facts).hex()}"
