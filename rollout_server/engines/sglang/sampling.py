"""What is asked of SGLang for one sample, and what comes back. Used on both sides; imports neither torch nor SGLang."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from relax_common.json_types import JsonMapping, JsonObject


@dataclass(frozen=True)
class Span:
    """Output tokens from `start` to `end` (exclusive) were sampled under `version`."""

    version: str
    start: int
    end: int


@dataclass(frozen=True)
class SampleOutput:
    """One continuation as the engine gave it. `finish` is stop, length or abort."""

    token_ids: npt.NDArray[np.int32]
    log_probs: npt.NDArray[np.float32]
    finish: str
    spans: Sequence[Span]
    cached_tokens: int

    def header(self) -> JsonObject:
        spans = [[span.version, span.start, span.end] for span in self.spans]
        return {"finish": self.finish, "spans": spans, "cached_tokens": self.cached_tokens}

    def payload(self) -> bytes:
        return self.token_ids.tobytes() + self.log_probs.tobytes()


def from_frame(header: JsonMapping, payload: bytes) -> SampleOutput:
    count = len(payload) // 8
    return SampleOutput(
        token_ids=np.frombuffer(payload, np.int32, count),
        log_probs=np.frombuffer(payload, np.float32, count, 4 * count),
        finish=header["finish"],
        spans=[Span(*span) for span in header["spans"]],
        cached_tokens=header["cached_tokens"],
    )


def sampling_params(temperature: float, max_new_tokens: int, stop_token_ids: Sequence[int]) -> JsonObject:
    """Every parameter that changes the distribution is given, because the model's folder may set other defaults."""
    return {
        "temperature": temperature,
        "max_new_tokens": max_new_tokens,
        "stop_token_ids": list(stop_token_ids),
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "skip_special_tokens": False,
    }


def output_of(answer: JsonMapping) -> SampleOutput:
    """Reads SGLang's answer, from Engine or HTTP. Raises ValueError if it is not that of a finished sample."""
    meta = answer["meta_info"]
    reason = meta["finish_reason"]
    if reason["type"] == "abort" and reason.get("status_code"):
        raise ValueError(f"SGLang refused the request: {reason.get('message')}")
    entries = meta.get("output_token_logprobs") or []
    token_ids = np.array(answer.get("output_ids") or [], np.int32)
    if [entry[1] for entry in entries] != token_ids.tolist():
        raise ValueError(f"SGLang gave {len(token_ids)} tokens and log-probs of {len(entries)} others")
    return SampleOutput(
        token_ids=token_ids,
        log_probs=np.array([entry[0] for entry in entries], np.float32),
        finish=reason["type"],
        spans=[Span(each["version"], each["start"], each["end"]) for each in meta.get("weight_versions") or []],
        cached_tokens=meta.get("cached_tokens", 0),
    )
