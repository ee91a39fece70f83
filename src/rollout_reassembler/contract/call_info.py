"""What a call says of itself beside its tokens: why it ended, how it was sampled, by which weights.

It travels in the call's extras, as JSON under the key `call`, so the extras' digest, and by it the call's, binds it:

    {"call": '{"finish_reason":"stop","temperature":1.0,"logprobs":"raw","weight_versions":[[0,7],[3,8]]}'}

Here the first three sampled tokens are version 7's; then the weights changed, the engine went on with the same
message, and from the fourth on they are version 8's. It is one call. What is not known is left out.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, StrictBool, StrictFloat, ValidationError, model_validator

from rollout_reassembler.contract.errors import InvalidStagedCall
from rollout_reassembler.contract.records import Count

CALL_KEY = "call"
INVALID_CALL_INFO = "invalid_call_info"

FinishReason = Literal["stop", "length", "tool_calls", "abort"]
LogProbMode = Literal["raw", "processed"]
"""Log probabilities of the model's own distribution, or of what was sampled from: after temperature and the like."""


class CallInfo(BaseModel):
    """What is known of one call. `weight_versions` are `(start, version)`: sampled tokens from `start` on are its."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    finish_reason: FinishReason | None = None
    temperature: StrictFloat | None = None
    logprobs: LogProbMode | None = None
    constrained: StrictBool | None = None
    weight_versions: tuple[tuple[Count, Count], ...] = ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.temperature is not None and self.temperature < 0:
            raise ValueError(f"temperature {self.temperature} is below 0")
        starts = [start for start, _ in self.weight_versions]
        if starts and (starts[0] != 0 or starts != sorted(set(starts))):
            raise ValueError(f"weight_versions start at {starts}; expected 0, then ever later tokens")
        return self

    def check_length(self, generation_len: int) -> None:
        """Raises `InvalidStagedCall` (`invalid_call_info`) where versions begin behind the last sampled token."""
        if self.weight_versions and self.weight_versions[-1][0] >= max(generation_len, 1):
            raise InvalidStagedCall(
                f"weight_versions begin at token {self.weight_versions[-1][0]} of {generation_len} sampled",
                code=INVALID_CALL_INFO,
            )

    def encode(self) -> str:
        """What is known, as JSON."""
        return self.model_dump_json(exclude_none=True, exclude_defaults=True)

    @classmethod
    def decode(cls, encoded: str | bytes) -> Self:
        """Raises `InvalidStagedCall` (`invalid_call_info`) for what no call can say."""
        try:
            return cls.model_validate_json(encoded)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(map(str, (CALL_KEY, *first["loc"])))
            raise InvalidStagedCall(f"extras {place}: {first['msg']}", code=INVALID_CALL_INFO) from error
