"""What the policy can and cannot have said: values that no engine means are refused where they enter.

    model = ModelShape(vocab_size=151_936, layers=48, experts=128, top_k=8)
    recorder = CallRecorder(sink, weight_version=lambda: 7, model=model)  # likewise seal_call(..., model=model)

Each of these was published as valid by somebody's system, and trained on: a token id beyond the vocabulary
(an uninitialised buffer), a log probability above 0 (another quantity), exactly -9999.0 (an engine's word for
"none"), an expert that the model does not have, one expert twice for one token (a shifted buffer). What is not
known of a model is not checked; log probabilities always are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollout_reassembler.contract.digests import Floats, Integers
from rollout_reassembler.contract.errors import InvalidRoutes, InvalidStagedCall
from rollout_reassembler.contract.routed_experts import BOUNDARY_KEY, MISSING_ROUTE, ROUTES_KEY, decode_routed_experts

IMPOSSIBLE_VALUE = "impossible_value"

NO_LOG_PROB = -9999.0
"""What engines report where they have no log probability."""

FLOAT_NOISE = 1e-4
"""How far above 0 rounding may carry the logarithm of a probability of 1."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a policy, as far as they are known: `vocab_size` ids, `layers` routed layers, `top_k` of `experts`.

    Raises `ValueError` for a size that cannot be one.
    """

    vocab_size: int | None = None
    layers: int | None = None
    experts: int | None = None
    top_k: int | None = None

    def __post_init__(self) -> None:
        for name, size in vars(self).items():
            if size is not None and (type(size) is not int or size < 1):
                raise ValueError(f"{name} must be a positive int, or None where it is not known, got {size!r}")
        if self.experts is not None and self.top_k is not None and self.top_k > self.experts:
            raise ValueError(f"top_k {self.top_k} of {self.experts} experts")

    @property
    def knows_routes(self) -> bool:
        """Whether anything is known that routes can be held to."""
        return (self.layers, self.experts, self.top_k) != (None, None, None)

    def check_token_ids(self, token_ids: Integers) -> None:
        """Raise `InvalidStagedCall` (`impossible_value`) for an id that the vocabulary does not have. `[T]`."""
        if self.vocab_size is None:
            return
        beyond = np.flatnonzero(token_ids >= self.vocab_size)
        if beyond.size:
            at = int(beyond[0])
            raise InvalidStagedCall(
                f"token id {token_ids[at]} at {at}; the vocabulary has {self.vocab_size}", code=IMPOSSIBLE_VALUE
            )

    def check_extras(self, extras: Mapping[str, Any] | None) -> None:
        """Hold the routes in a call's extras against the model. Raises `InvalidRoutes`."""
        if not self.knows_routes or not extras:
            return
        for key in (ROUTES_KEY, BOUNDARY_KEY):
            if extras.get(key) is not None:
                self._check_routes(decode_routed_experts(extras[key]), key)

    def _check_routes(self, routes: Any, what: str) -> None:
        """Routes `[T, L, K]`."""
        _, layers, top_k = routes.shape
        for name, found, known in (("layers", layers, self.layers), ("top_k", top_k, self.top_k)):
            if known is not None and found != known:
                raise InvalidRoutes(f"{what} have {name} {found}, the model has {known}", code=IMPOSSIBLE_VALUE)
        if self.experts is not None and int(routes.max()) >= self.experts:
            token, layer, _ = map(int, np.argwhere(routes >= self.experts)[0])
            raise InvalidRoutes(
                f"{what} name expert {int(routes[token, layer].max())} at token {token}, layer {layer}; the model has "
                f"{self.experts}",
                code=IMPOSSIBLE_VALUE,
            )
        ordered = np.sort(routes, axis=-1)
        twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] != MISSING_ROUTE)
        if twice.any():
            token, layer, place = map(int, np.argwhere(twice)[0])
            raise InvalidRoutes(
                f"{what} name expert {int(ordered[token, layer, place])} twice at token {token}, layer {layer}",
                code=IMPOSSIBLE_VALUE,
            )


def check_log_probs(log_probs: Floats, mask: Floats) -> None:
    """Raise `InvalidStagedCall` (`impossible_value`) where a sampled value is no logarithm of a probability. `[T]`."""
    if len(log_probs) != len(mask):
        return
    wrong = np.flatnonzero((mask != 0) & ((log_probs > FLOAT_NOISE) | (log_probs == NO_LOG_PROB)))
    if wrong.size:
        at = int(wrong[0])
        what = "is what engines say for none" if log_probs[at] == NO_LOG_PROB else "is above 0"
        raise InvalidStagedCall(f"log probability {log_probs[at]:g} at {at} {what}", code=IMPOSSIBLE_VALUE)
