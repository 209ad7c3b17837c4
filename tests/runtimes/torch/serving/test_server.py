"""The endpoint as OpenAI's client and plain HTTP see it."""

import contextlib
import http.client
import json
import os
import signal
import threading
import time

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
openai = pytest.importorskip("openai")

from qsync_opt.errors import ModelError, ProblemError  # noqa: E402
from qsync_opt.runtimes.torch.serving import (  # noqa: E402
    Engine,
    EngineLimits,
    LocalWorkers,
    StageError,
    StageProcesses,
    TextStream,
    bind,
    generate_here,
    load_tokenizer,
    make_app,
    open_model,
    serve,
)

WAIT_S = 120
LIMITS = {"context": 64, "cached": 256}


class Server:
    """A server in a thread of this process, at a port of its own."""

    def __init__(self, workers, tokenizer, **limits):
        self.engine = Engine(workers, EngineLimits(**(LIMITS | limits)))
        self.cancelled = 0
        self.engine.cancel = self.count_cancelled(self.engine.cancel)
        self.listening = bind("127.0.0.1", 0)
        self.port = self.listening.getsockname()[1]
        self.error = None
        app = make_app(self.engine, tokenizer, "small")
        self.thread = threading.Thread(target=self.run, args=(app,), daemon=True)
        self.thread.start()
        self.client = openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0)

    def count_cancelled(self, cancel):
        def counted(request):
            cancel(request)
            self.cancelled += 1

        return counted

    def run(self, app):
        try:
            serve(app, self.engine, self.listening)
        except StageError as failure:
            self.error = failure

    def get(self, path):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        with contextlib.closing(connection):
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

    def post(self, path, body):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        with contextlib.closing(connection):
            connection.request("POST", path, body if isinstance(body, bytes) else json.dumps(body))
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())

    def until(self, holds):
        end = time.monotonic() + WAIT_S
        while not holds():
            assert time.monotonic() < end
            time.sleep(0.01)


@pytest.fixture
def start():
    servers = []

    def begin(*arguments, **limits):
        servers.append(Server(*arguments, **limits))
        return servers[-1]

    yield begin
    for server in servers:
        server.client.close()
        server.engine.on_failure("the test is over")
        server.thread.join(WAIT_S)
        server.engine.close()
        assert not server.thread.is_alive()


@pytest.fixture(scope="module")
def tokenizer(talking_folder):
    return load_tokenizer(talking_folder, open_model(talking_folder)[0])


def test_completions_are_those_of_the_model(start, load, talking_folder, tokenizer):
    stages = load(talking_folder)
    prompt = tokenizer.encode("to be")
    (tokens,) = generate_here(stages, [prompt], 12)
    expected = tokenizer.decode(tokens)
    server = start(LocalWorkers(stages), tokenizer)
    create = server.client.completions.create
    for given in ("to be", prompt):
        answer = create(model="small", prompt=given, max_tokens=12, temperature=0)
        assert answer.choices[0].text == expected
        assert answer.choices[0].finish_reason == "length"
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 12)
    both = create(model="small", prompt=["to be", "or"], max_tokens=12, temperature=0).choices
    assert [choice.index for choice in both] == [0, 1]
    assert both[0].text == expected != both[1].text
    stop = expected[4:6]
    stopped = create(model="small", prompt="to be", max_tokens=12, temperature=0, stop=[stop]).choices[0]
    assert (stopped.text, stopped.finish_reason) == (expected[: expected.index(stop)], "stop")
    drawn = [create(model="small", prompt="to be", max_tokens=12, temperature=2, seed=s) for s in (1, 2, 1)]
    assert drawn[0].choices[0].text == drawn[2].choices[0].text != drawn[1].choices[0].text
    server.until(lambda: server.engine.running == 0)
    assert server.engine.pages_used == 0


def test_chat_and_streams(start, load, talking_folder, tokenizer):
    stages = load(talking_folder)
    (tokens,) = generate_here(stages, [tokenizer.encode("user: hi~assistant: ")], 10)
    expected = tokenizer.decode(tokens)
    server = start(LocalWorkers(stages), tokenizer)
    messages = [{"role": "user", "content": "hi"}]
    arguments = {"model": "small", "messages": messages, "max_tokens": 10, "temperature": 0}
    answer = server.client.chat.completions.create(**arguments)
    assert answer.choices[0].message.content == expected
    assert answer.choices[0].message.role == "assistant"
    stream = server.client.chat.completions.create(**arguments, stream=True, stream_options={"include_usage": True})
    parts = list(stream)
    assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == expected
    assert [part.choices[0].finish_reason for part in parts if part.choices][-1] == "length"
    assert parts[-1].usage.completion_tokens == 10
    assert len(parts) > 5
    text = server.client.completions.create(model="small", prompt="x", max_tokens=10, temperature=0, stream=True)
    assert "".join(part.choices[0].text for part in text) == tokenizer.decode(
        generate_here(stages, [tokenizer.encode("x")], 10)[0]
    )
    assert [model.id for model in server.client.models.list()] == ["small"]


def test_bad_requests_are_refused_with_the_reason(start, load, talking_folder, tokenizer):
    server = start(LocalWorkers(load(talking_folder)), tokenizer)
    create = server.client.completions.create
    for arguments, text in (
        ({"prompt": "x" * 60, "max_tokens": 5}, "60 tokens and 5 new ones are asked for.* planned for 64"),
        ({"prompt": "x" * 65}, "65 tokens and 1 new ones"),
        ({"prompt": "x", "n": 2}, "n is 2"),
        ({"prompt": [97]}, "token 97"),
        ({"prompt": ""}, "prompt must be"),
        ({"prompt": "x", "temperature": -1}, "temperature is -1, but it must be a number at least 0"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens is 0, but it must be a whole number at least 1"),
        ({"prompt": "x", "logprobs": 3}, "logprobs is 3"),
    ):
        with pytest.raises(openai.BadRequestError, match=text):
            create(model="small", **arguments)
    with pytest.raises(openai.NotFoundError, match="this server has 'small'"):
        create(model="large", prompt="x")
    status, body = server.post("/v1/completions", b"{")
    assert (status, body["error"]["type"]) == (400, "invalid_request_error")
    for messages in ([], "hi", [{"content": "hi"}], [{"role": "user", "content": [{"type": "image_url"}]}]):
        status, body = server.post("/v1/chat/completions", {"model": "small", "messages": messages})
        assert (status, body["error"]["param"]) == (400, "messages")
    assert server.post("/v1/completions", b"[" * 100_000)[0] == 400
    assert server.engine.pages_used == server.engine.counts.new_tokens == 0


def test_without_a_tokenizer_prompts_are_tokens(start, load, llama):
    server = start(LocalWorkers(load(llama[1])), load_tokenizer(llama[1], open_model(llama[1])[0]))
    answer = server.client.completions.create(model="small", prompt=[5, 9], max_tokens=3, temperature=0)
    assert answer.usage.completion_tokens == 3
    assert [int(token) for token in answer.choices[0].text.split()] == generate_here(load(llama[1]), [[5, 9]], 3)[0]
    with pytest.raises(openai.BadRequestError, match="no tokenizer"):
        server.client.completions.create(model="small", prompt="x")
    with pytest.raises(openai.BadRequestError, match="no tokenizer"):
        server.client.chat.completions.create(model="small", messages=[{"role": "user", "content": "hi"}])


def test_a_full_queue_is_429_and_a_gone_client_frees_its_memory(start, load, held, talking_folder, tokenizer):
    workers = held(load(talking_folder))
    server = start(workers, tokenizer, cached=64, waiting=1)
    stream = server.client.completions.create(model="small", prompt="x", max_tokens=60, stream=True)
    workers.permits.release(2)
    next(iter(stream))
    waiting = threading.Thread(
        target=server.client.completions.create, kwargs={"model": "small", "prompt": "y", "max_tokens": 60}
    )
    waiting.start()
    server.until(lambda: server.engine.waiting == 1)
    with pytest.raises(openai.RateLimitError, match="1 requests run and 1 wait"):
        server.client.completions.create(model="small", prompt="z", max_tokens=60)
    status, text = server.get("/metrics")
    assert status == 200
    for line in (
        "qsync_serving_requests_running 1", "qsync_serving_requests_waiting 1", "qsync_serving_refused_total 1",
        "qsync_serving_cache_pages_used 4", "qsync_serving_up 1",
    ):  # fmt: skip
        assert line in text.splitlines()
    stream.close()
    server.until(lambda: server.cancelled == 1)
    workers.let_go()
    waiting.join(WAIT_S)
    server.until(lambda: server.engine.pages_used == 0)
    assert server.engine.counts.finished == {"cancelled": 1, "length": 1}


def test_a_client_that_goes_without_a_stream(start, load, held, talking_folder, tokenizer):
    workers = held(load(talking_folder))
    server = start(workers, tokenizer)
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    connection.request("POST", "/v1/completions", json.dumps({"prompt": "x", "max_tokens": 60}))
    server.until(lambda: server.engine.running == 1)
    connection.close()
    server.until(lambda: server.cancelled == 1)
    workers.let_go()
    server.until(lambda: server.engine.running == 0)
    assert server.engine.counts.finished == {"cancelled": 1}


def test_a_killed_stage_answers_everybody_and_ends_the_server(start, plan_of, talking_folder, tokenizer):
    workers = StageProcesses(str(talking_folder), plan_of(3))
    server = start(workers, tokenizer, context=4000, cached=4000, running=1)
    assert json.loads(server.get("/health")[1])["status"] == "ok"
    stream = iter(server.client.completions.create(model="small", prompt="x", max_tokens=3900, stream=True))
    next(stream)
    outcome = []

    def ask():
        try:
            server.client.completions.create(model="small", prompt="y", max_tokens=10)
        except openai.InternalServerError as failure:
            outcome.append(failure)

    waiting = threading.Thread(target=ask)
    waiting.start()
    server.until(lambda: server.engine.waiting == 1)
    os.kill(workers.pids[1], signal.SIGKILL)
    with pytest.raises(openai.APIError, match="stage 1"):
        for _ in stream:
            pass
    waiting.join(WAIT_S)
    assert outcome[0].status_code == 503
    assert "stage 1" in str(outcome[0])
    server.thread.join(WAIT_S)
    assert "stage 1" in str(server.error)


def test_a_taken_port_is_named():
    with bind("127.0.0.1", 0) as listening, pytest.raises(ProblemError, match=r"port.*choose another by --port"):
        bind("127.0.0.1", listening.getsockname()[1])
    with pytest.raises(ProblemError, match="cannot listen"):
        bind("127.0.0.1", 70000)


def test_a_tokenizer_of_another_model_is_refused(talking_folder, tmp_path):
    import dataclasses

    config, _ = open_model(talking_folder)
    with pytest.raises(ModelError, match="97 tokens, but the model 50; it belongs to another model"):
        load_tokenizer(talking_folder, dataclasses.replace(config, vocabulary=50))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        load_tokenizer(tmp_path, config)


class Bytes:
    """A tokenizer whose tokens are bytes."""

    def decode(self, tokens):
        return bytes(tokens).decode("utf-8", "replace")


@pytest.mark.parametrize(
    ("text", "stops", "expected", "stopped"),
    [
        ("a ß€𝄞 z", [], "a ß€𝄞 z", False),
        ("one, two", [", t"], "one", True),
        ("one, two", [", x", "nope"], "one, two", False),
        ("aab", ["ab"], "a", True),
        ("ab€cd", ["€c", "zz"], "ab", True),
        ("ends with €", ["€€"], "ends with €", False),
    ],
)
def test_text_comes_in_whole_characters_and_ends_at_a_stop(text, stops, expected, stopped):
    stream = TextStream(Bytes(), stops)
    parts = []
    for byte in text.encode():
        parts.append(stream.push(byte))
        if stream.stopped:
            break
    parts.append(stream.finish())
    assert "".join(parts) == expected
    assert stream.stopped == stopped
    assert not any("\ufffd" in part for part in parts)
