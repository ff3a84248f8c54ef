"""How far a node's weights are, as they stream in."""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)


class LoadProgress:
    """Logs how far the weights are, at each tenth."""

    def __init__(self, node_id: str) -> None:
        self._node_id = node_id
        self._tenths = 0

    def __call__(self, nbytes_done: int, nbytes_total: int, tensor_name: str) -> None:
        tenths = 10 * nbytes_done // max(nbytes_total, 1)
        if tenths > self._tenths:
            self._tenths = tenths
            log.info("weights: %d%% of %.1f MB", 10 * tenths, nbytes_total / 1e6)
