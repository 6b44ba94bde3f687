"""Parts of the SGLang adapter without SGLang: frames, HTTP, pieces of samples, tensors of a checkpoint."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from rollout_server.engines.contract import EngineError, FinishReason, RequestRefused
from rollout_server.engines.sglang.backend import BackendLost
from rollout_server.engines.sglang.cpu import standins
from rollout_server.engines.sglang.engine import check_tensors, tensor_shapes
from rollout_server.engines.sglang.frames import PAYLOAD_BYTES_MAX, BrokenFrame, frame, read_frame
from rollout_server.engines.sglang.http import HttpClient
from rollout_server.engines.sglang.jobs import ForeignWeights, Sample
from rollout_server.engines.sglang.sampling import SampleOutput, Span, from_frame, output_of
from rollout_server.engines.torch.sampling import rollout_log_probs


def output(tokens: list[int], finish: str, *spans: tuple[str, int, int]) -> SampleOutput:
    log_probs = np.array([-float(token) for token in tokens], np.float32)
    return SampleOutput(np.array(tokens, np.int32), log_probs, finish, [Span(*span) for span in spans], 0)


def test_I2_a_sample_in_pieces_keeps_the_version_of_each_token() -> None:
    sample = Sample([1, 2], max_new_tokens=6)
    sample.take(output([3, 4], "abort", ("7", 0, 2)), [7])
    assert not sample.ended
    assert (sample.so_far(), sample.n_new) == ([1, 2, 3, 4], 2)
    sample.take(output([5, 6, 9], "stop", ("7", 0, 1), ("8", 1, 3)), [7, 8])
    completion = sample.completion()
    assert completion.token_ids.tolist() == [3, 4, 5, 6, 9]
    assert completion.log_probs.tolist() == [-3, -4, -5, -6, -9]
    assert completion.versions.tolist() == [7, 7, 7, 8, 8]
    assert completion.finish_reason is FinishReason.STOP


def test_a_sample_that_was_interrupted_at_its_last_token_has_its_length() -> None:
    sample = Sample([1], max_new_tokens=2)
    sample.take(output([3, 4], "abort", ("7", 0, 2)), [7])
    assert sample.completion().finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("spans", [[("8", 0, 2)], [("default", 0, 2)], [("7", 0, 1)], [("7", 1, 2)], []])
def test_I6_tokens_of_weights_that_were_not_loaded_here_are_refused(spans: list[tuple[str, int, int]]) -> None:
    with pytest.raises(ForeignWeights):
        Sample([1], 4).take(output([3, 4], "length", *spans), [7])


def test_an_output_survives_its_frame() -> None:
    sent = output([3, 4, 5], "length", ("7", 0, 3))
    got = from_frame(json.loads(json.dumps(sent.header())), sent.payload())
    assert got.token_ids.tolist() == [3, 4, 5]
    assert got.log_probs.tolist() == [-3, -4, -5]
    assert (got.finish, got.spans) == ("length", [Span("7", 0, 3)])


def test_an_answer_whose_log_probs_are_of_other_tokens_is_no_sample() -> None:
    meta = {"finish_reason": {"type": "length"}, "output_token_logprobs": [[-1.0, 5, None]], "weight_versions": []}
    with pytest.raises(ValueError, match="log-probs"):
        output_of({"output_ids": [4], "meta_info": meta})
    refused = {"finish_reason": {"type": "abort", "status_code": 400, "message": "too long"}}
    with pytest.raises(ValueError, match="too long"):
        output_of({"output_ids": [], "meta_info": refused})


def read(data: bytes) -> tuple[dict[str, object], bytes]:
    async def feed() -> tuple[dict[str, object], bytes]:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        return await read_frame(reader)

    return asyncio.run(feed())


def test_frames_carry_a_header_and_bytes() -> None:
    head, payload = frame({"call": "x", "name": "ä"}, memoryview(b"\x00\x01"))
    assert read(head + bytes(payload)) == ({"call": "x", "name": "ä"}, b"\x00\x01")
    assert read(frame({"a": 1})[0]) == ({"a": 1}, b"")
    with pytest.raises(asyncio.IncompleteReadError):
        read(head[:-1])
    with pytest.raises(BrokenFrame):
        read(b"\xff" * 12)
    with pytest.raises(BrokenFrame, match="at most"):
        frame({}, bytes(PAYLOAD_BYTES_MAX + 1))


def test_a_checkpoints_tensors_are_known_from_its_headers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
    with pytest.raises(EngineError, match=r"no \.safetensors file"):
        tensor_shapes(tmp_path)
    weights = {"model.embed_tokens.weight": torch.zeros(4, 2), "lm_head.weight": torch.zeros(4, 2)}
    save_file(weights, tmp_path / "model.safetensors")
    shapes = tensor_shapes(tmp_path)
    assert shapes == {"model.embed_tokens.weight": (4, 2)}
    check_tensors(shapes, {"model.embed_tokens.weight": torch.zeros(4, 2)})
    with pytest.raises(EngineError, match=r"is \(2, 4\), the model has \(4, 2\)"):
        check_tensors(shapes, {"model.embed_tokens.weight": torch.zeros(2, 4)})


Serve = Callable[..., tuple[HttpClient, list[bytes]]]


@pytest.fixture
def serve() -> Serve:
    """serve(answer, ...): a server that gives one raw answer per connection, and repeats the last one."""

    def start(*answers: bytes) -> tuple[HttpClient, list[bytes]]:
        listener = socket.create_server(("127.0.0.1", 0))
        requests: list[bytes] = []

        def run() -> None:
            while True:
                connection, _ = listener.accept()
                with connection:
                    requests.append(connection.recv(65536))
                    connection.sendall(answers[min(len(requests), len(answers)) - 1])

        threading.Thread(target=run, daemon=True).start()
        return HttpClient(f"http://127.0.0.1:{listener.getsockname()[1]}"), requests

    return start


def answer(status: str, body: bytes) -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def ask(client: HttpClient, body: object = None, seconds: float = 5.0) -> object:
    return asyncio.run(client.call("POST", "/path", body, deadline_seconds=seconds))  # type: ignore[arg-type]


def test_transient_answers_are_repeated_each_try_with_a_body_of_its_own(serve: Serve) -> None:
    chunked = b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\n{"a"\r\n3\r\n:1}\r\n0\r\n\r\n'
    client, requests = serve(b"", answer("502 Bad Gateway", b"later"), answer("503 Busy", b""), chunked)
    assert ask(client, lambda attempt: {"try": attempt}) == {"a": 1}
    assert [json.loads(each.partition(b"\r\n\r\n")[2]) for each in requests] == [{"try": n} for n in range(4)]
    assert b"POST /path HTTP/1.1" in requests[0]


def test_other_failures_are_not_repeated_and_say_what_came(serve: Serve) -> None:
    client, requests = serve(answer("400 Bad Request", b'{"error": "too long"}'))
    with pytest.raises(RequestRefused, match=r"HTTP 400.*too long"):
        ask(client)
    assert len(requests) == 1
    with pytest.raises(EngineError, match="HTTP 404: no text"):
        ask(serve(answer("404 Not Found", b""))[0])


def test_silence_ends_at_the_deadline_with_the_last_failure(serve: Serve) -> None:
    with pytest.raises(BackendLost, match="has not answered for 0 s: HTTP 502: later"):
        ask(serve(answer("502 Bad Gateway", b"later"))[0], seconds=0.3)
    with pytest.raises(BackendLost, match="is not HTTP"):
        ask(serve(b"SSH-2.0-x\r\n\r\n")[0], seconds=0.3)


def test_log_probs_over_a_large_vocabulary_are_those_of_exact_sums() -> None:
    torch.manual_seed(0)
    logits = torch.randn(8, 49152) * 3
    expected = torch.log_softmax(logits.double(), -1)
    for found in (
        rollout_log_probs(logits, torch.ones(8), 49152),
        standins._log_softmax(logits),
        standins._softmax(logits).log(),
    ):
        assert (found.double() - expected).abs().max() <= 5e-6
        assert (found.double() - expected).mean().abs() <= 2e-7
