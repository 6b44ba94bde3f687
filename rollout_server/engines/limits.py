"""What a request may ask of any engine."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

from relax_common.json_types import JsonObject
from rollout_server.engines.contract import EngineError, GenerateRequest, RequestRefused


@dataclass(frozen=True)
class Limits:
    """`vocab_size` is the true vocabulary, `max_tokens` the longest sequence of prompt and response."""

    vocab_size: int
    max_tokens: int
    end_ids: frozenset[int]

    def check(self, request: GenerateRequest) -> None:
        """Raises RequestRefused with what is wrong."""
        prompt, who = request.prompt_ids, f"request {request.request_id}"
        if not prompt:
            raise RequestRefused(f"{who}: the prompt has no tokens")
        if min(prompt) < 0 or max(prompt) >= self.vocab_size:
            raise RequestRefused(f"{who}: the prompt has ids outside 0..{self.vocab_size - 1}")
        if len(prompt) + request.sampling.max_new_tokens > self.max_tokens:
            raise RequestRefused(
                f"{who}: {len(prompt)} prompt tokens + {request.sampling.max_new_tokens} new exceed the model's "
                f"{self.max_tokens}"
            )
        if request.n_samples < 1 or request.sampling.max_new_tokens < 1:
            raise RequestRefused(f"{who}: samples and new tokens must be >= 1")
        if not 0 <= request.sampling.temperature < math.inf:
            raise RequestRefused(f"{who}: temperature = {request.sampling.temperature}: it must be a number >= 0")


def read_limits(model_dir: Path) -> Limits:
    path = model_dir / "config.json"
    if not path.is_file():
        raise EngineError(f"{model_dir} has no config.json: name a Hugging Face model folder")
    config = json.loads(path.read_text(encoding="utf-8"))
    text = config.get("text_config", config)
    return Limits(text["vocab_size"], text["max_position_embeddings"], end_token_ids(model_dir))


def end_token_ids(model_dir: Path) -> frozenset[int]:
    """Every id that config.json or generation_config.json calls an end token, and the tokenizer's: they often disagree,
    and a model that has learnt any of them would run past it."""
    ids: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        value = _json(model_dir / name).get("eos_token_id")
        if value is not None:
            ids.update(value if isinstance(value, list) else [value])
    ids |= _end_token_of_tokenizer(model_dir)
    if not ids:
        raise EngineError(f"{model_dir} names no eos_token_id in config.json or generation_config.json")
    return frozenset(ids)


def _end_token_of_tokenizer(model_dir: Path) -> set[int]:
    token = _json(model_dir / "tokenizer_config.json").get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    if not text:
        return set()
    tokenizer = _json(model_dir / "tokenizer.json")
    added = {entry["content"]: entry["id"] for entry in tokenizer.get("added_tokens") or []}
    vocabulary = (tokenizer.get("model") or {}).get("vocab")
    known = {**vocabulary, **added} if isinstance(vocabulary, dict) else added
    return {known[text]} if text in known else set()


def _json(path: Path) -> JsonObject:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
