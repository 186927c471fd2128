"""openai's package against the real routes: tools, likeliest tokens, streams with usage, seeds and stop strings."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from actors.serve.openai import _Answer, _assistant, _by_text, _function, _message, _reason, _token
from actors.serve.sampling import STREAMED_TOKENS
from rl_backend.contracts import BatchError
from rl_backend.environment.protocol import Generation
from rl_backend.environment.tool_call_parsers import ParsedTurn
from tests.support.chat_templates import chat_tokenizer
from tests.support.models import write_tiny
from tests.support.serve_wire import Wire
from tests.support.served import served
from tests.support.torch_engine import TorchEngine

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool.function.name }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function.arguments.x }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>{"name": "add", "arguments": {"x": 1, "y": "\\u00e9"}}</tool_call>'


@pytest.fixture(scope="module")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    tokenizer = chat_tokenizer(TEMPLATE)
    model = write_tiny(
        "qwen3",
        tmp_path_factory.mktemp("talking") / "model",
        vocab_size=512,
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
    )
    tokenizer.save_pretrained(model)
    with served(model, tmp_path_factory.mktemp("state"), max_tokens=256) as found:
        found.door = openai.OpenAI(base_url=f"{found.url}/v1", api_key="tml-local", max_retries=0)
        found.name, found.model, found.tokenizer = str(model), model, AutoTokenizer.from_pretrained(model)
        yield found


type Say = Callable[[str], list[list[int]]]


@pytest.fixture
def say(talking: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Say:
    """Lets the model say a text, as an engine that samples it would; returns the prompts that it gets from then on."""

    def script(text: str) -> list[list[int]]:
        whole, prompts = [*talking.tokenizer.encode(text, add_special_tokens=False), *end_of(talking)], list[list[int]]()

        def generate(_: TorchEngine, prompt: Any, config: Any, adapter: Any, seed: int, most: int) -> Generation:
            prompts.append(list(prompt))
            # Of a stream the next piece: what was said before is the end of its prompt.
            said = next(size for size in range(len(whole) - 1, -1, -1) if not size or list(prompt)[-size:] == whole[:size])
            tokens = whole[said : said + most]
            finish: Any = "stop" if said + most >= len(whole) else "length"
            return Generation(tokens, [-0.5] * len(tokens), finish, [0] * len(tokens))

        monkeypatch.setattr(TorchEngine, "generate", generate)
        return prompts

    return script


def end_of(talking: SimpleNamespace) -> list[int]:
    return [int(talking.tokenizer.convert_tokens_to_ids("<|im_end|>"))]


def chat(talking: SimpleNamespace, **options: Any) -> Any:
    asked = {"model": talking.name, "messages": [{"role": "user", "content": "1+2"}], "max_tokens": 200, **options}
    return talking.door.chat.completions.create(**asked)


@pytest.mark.shows("server: openai's package calls tools of a model")
def test_calls_of_tools_are_read_shown_to_the_model_and_answered(talking: SimpleNamespace, say: Say) -> None:
    prompts = say(f"let me see {CALL}")
    (choice,) = chat(talking, tools=TOOLS).choices
    assert choice.finish_reason == "tool_calls" and choice.message.content == "let me see"
    (call,) = choice.message.tool_calls
    assert call.function.name == "add" and json.loads(call.function.arguments) == {"x": 1, "y": "é"}
    assert "system\nadd" in talking.tokenizer.decode(prompts[0])
    parts: Any = [{"type": "text", "text": "1+"}, {"type": "text", "text": "2"}]
    history: Any = [
        {"role": "user", "content": parts},
        choice.message.model_dump(),
        {"role": "tool", "tool_call_id": call.id, "content": "3"},
    ]
    chat(talking, messages=history, tools=TOOLS)
    assert "1+2<|im_end|>" in talking.tokenizer.decode(prompts[1])
    assert "<tool_call>1</tool_call><|im_end|>\n<|im_start|>tool\n3" in talking.tokenizer.decode(prompts[1])
    (whole,) = chat(talking, tools=TOOLS, tool_choice="none").choices
    assert whole.message.tool_calls is None and whole.message.content == f"let me see {CALL}"
    assert "system" not in talking.tokenizer.decode(prompts[2])


def test_a_call_that_cannot_be_read_is_text(talking: SimpleNamespace, say: Say) -> None:
    say('<tool_call>{"name": </tool_call>')
    (choice,) = chat(talking, tools=TOOLS).choices
    assert choice.finish_reason == "stop" and choice.message.content == '<tool_call>{"name": </tool_call>'


@pytest.mark.parametrize(("tools", "reason"), [(TOOLS, "tool_calls"), ([], "stop")])
def test_a_stream_has_what_a_whole_answer_has_and_its_usage(
    tools: Any, reason: str, talking: SimpleNamespace, say: Say
) -> None:
    say(f"let me see {CALL}")
    whole = chat(talking, tools=tools)
    say(f"let me see {CALL}")
    pieces = list(chat(talking, tools=tools, stream=True, stream_options={"include_usage": True}))
    choices = [each.choices[0] for each in pieces if each.choices]
    assert "".join(each.delta.content or "" for each in choices) == whole.choices[0].message.content
    assert (len(choices) > 2) == (not tools)
    calls = [(call.index, call.function.arguments) for each in choices for call in each.delta.tool_calls or ()]
    expected = [call.function.arguments for call in whole.choices[0].message.tool_calls or ()]
    assert calls == list(enumerate(expected))
    assert [each.finish_reason for each in choices if each.finish_reason] == [reason]
    assert not pieces[-1].choices and pieces[-1].usage == whole.usage
    say("short")
    assert all(each.usage is None for each in chat(talking, stream=True))


def test_a_stop_string_ends_a_text_before_it_whole_or_in_pieces(talking: SimpleNamespace, say: Say) -> None:
    say("one two three")
    assert chat(talking, stop=["two"]).choices[0].message.content == "one "
    say("one two three")
    pieces = chat(talking, stop="two", stream=True)
    assert "".join(each.choices[0].delta.content or "" for each in pieces) == "one "


def test_a_stop_string_ends_a_stream_where_no_piece_has_all_of_it(talking: SimpleNamespace, say: Say) -> None:
    stop = "two three four five six seven eight nine!"
    prompts = say(f"one {stop} " + "more " * 20)
    # Longer than what is said when its beginning comes.
    pieces = list(chat(talking, stop=stop, stream=True))
    assert "".join(each.choices[0].delta.content or "" for each in pieces) == "one "
    assert pieces[-1].choices[0].finish_reason == "stop"
    said = talking.tokenizer.encode(f"one {stop}", add_special_tokens=False)
    assert len(prompts) <= len(said) // STREAMED_TOKENS + 2, "the model goes on behind the end"


def test_a_stream_has_one_role(talking: SimpleNamespace, say: Say) -> None:
    say("one two three four five six seven")
    messages: Any = [{"role": "user", "content": "1+2"}]
    with talking.door.chat.completions.stream(model=talking.name, messages=messages, max_tokens=200) as stream:
        message = stream.get_final_completion().choices[0].message
    assert (message.role, message.content) == ("assistant", "one two three four five six seven")


def test_likeliest_tokens_are_those_of_torch_and_seeds_repeat_samples(talking: SimpleNamespace) -> None:
    asked: Any = {"temperature": 0.7, "max_tokens": 5, "seed": 3}
    first = chat(talking, **asked, logprobs=True, top_logprobs=3).choices[0]
    again = chat(talking, **asked).choices[0]
    assert first.message.content == again.message.content and again.logprobs is None
    other = chat(talking, **{**asked, "seed": 4, "n": 2}, logprobs=True).choices
    # Texts of a random model may look the same.
    assert len({tuple(token.logprob for token in each.logprobs.content) for each in (first, *other)}) == 3
    content = first.logprobs.content
    ids = talking.tokenizer.encode("<|im_start|>user\n1+2<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)
    plain = talking.door.completions.create(model=talking.name, prompt=ids, logprobs=3, **asked).choices[0]
    assert plain.logprobs.token_logprobs == [each.logprob for each in content]
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(talking.model)(torch.tensor([ids])).logits[0, -1]
    values, tokens = (logits / 0.7).log_softmax(-1).topk(3)
    likely = [(each.token, pytest.approx(each.logprob, abs=1e-5)) for each in content[0].top_logprobs]
    assert likely == list(zip(map(talking.tokenizer.decode, tokens), values.tolist(), strict=True))
    assert list(plain.logprobs.top_logprobs[0].values()) == [each.logprob for each in content[0].top_logprobs]
    # As harnesses score texts: the prompt itself has log-probs, of what was before each of its tokens.
    echoed = talking.door.completions.create(
        model=talking.name, prompt=[ids], echo=True, logprobs=1, max_tokens=1, temperature=0
    ).choices[0]
    assert echoed.text.startswith(talking.tokenizer.decode(ids)) and len(echoed.logprobs.tokens) == len(ids) + 1
    with torch.no_grad():
        every = AutoModelForCausalLM.from_pretrained(talking.model)(torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = every[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    assert echoed.logprobs.token_logprobs[0] is None and echoed.logprobs.top_logprobs[0] is None
    assert echoed.logprobs.token_logprobs[1:-1] == pytest.approx(expected, abs=1e-5)
    assert echoed.logprobs.token_logprobs[-1] == pytest.approx(float(every[-1].max()), abs=1e-5)
    likeliest = [max(row.values()) for row in echoed.logprobs.top_logprobs[1:]]
    assert likeliest == pytest.approx(every.max(-1).values.tolist(), abs=1e-5)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
        ({"top_logprobs": 2}, "logprobs=true"),
        ({"logprobs": True, "stream": True}, "stream=true with logprobs"),
        ({"logprobs": True, "top_logprobs": 2, "top_p": 0.5}, "top_p"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "image"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"extra_body": {"min_p": 0.1}}, "min_p"),
        ({"n": 10**9}, "n=1000000000"),
        # An engine in which a step fails fails all that it runs.
        ({"seed": 2**70}, "seed=1180591620717411303424"),
        ({"stop": [""]}, "stop="),
        ({"stop": ["x"] * 300}, "stop: 3"),
        ({"logprobs": True, "top_logprobs": 21}, "number up to 20"),
        ({"temperature": -1, "stream": True}, "temperature"),
        ({"stop": 5}, "stop=5: expected a text"),
        ({"extra_body": {"tools": "x"}}, "tools: expected a list of objects"),
        ({"stream": True, "stream_options": "x"}, "stream_options='x': expected an object"),
    ],
)
def test_what_is_not_served_is_refused_by_name(options: dict[str, Any], named: str, talking: SimpleNamespace) -> None:
    with pytest.raises(openai.BadRequestError, match=named):
        chat(talking, **{"max_tokens": 1, **options})


def test_a_model_is_found_by_each_name_that_the_list_has(talking: SimpleNamespace) -> None:
    wire = Wire(talking.url)
    _, run = wire.run(talking.model)
    path = wire.answer(wire.post("save_weights_for_sampler", model_id=run, seq_id=1, path="a")).json()["path"]
    listed = talking.door.models.list().data
    assert {talking.name, run, path} <= {each.id for each in listed}
    assert [talking.door.models.retrieve(each.id) for each in listed] == listed
    assert talking.door.get(f"/models/{path}", cast_to=object)["id"] == path, "as clients write it that encode nothing"
    with pytest.raises(openai.NotFoundError, match="model='other' is not known"):
        talking.door.models.retrieve("other")


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "said"),
    [
        ("POST", "chat/completions", b"{", 400, "body: not JSON"),
        ("POST", "completions", b"\xff", 400, "body: not JSON"),
        ("POST", "completions", b"[]", 400, "expected an object"),
        ("POST", "completions", b'{"prompt": "1"}', 400, "model=None: expected a text"),
        ("POST", "completions", b'{"model": "other", "prompt": "1"}', 404, "model='other' is not known"),
        ("POST", "completions", b'{"model": "NAME", "prompt": "\\ud800"}', 400, "prompt: character 1 is '\\ud800', half of"),
        ("POST", "embeddings", b"{}", 404, "POST /v1/embeddings: Not Found; docs/serve.md"),
        ("GET", "completions", None, 405, "GET /v1/completions: Method Not Allowed"),
    ],
)
def test_every_error_is_an_object_of_openai_s(
    method: str, path: str, body: bytes | None, status: int, said: str, talking: SimpleNamespace
) -> None:
    headers = {"Authorization": "Bearer tml-local"}
    sent = None if body is None else body.replace(b"NAME", talking.name.encode())
    found = httpx.request(method, f"{talking.url}/v1/{path}", content=sent, headers=headers, timeout=60)
    error = found.json()["error"]
    assert found.status_code == status and error["code"] == str(status) and said in error["message"]
    assert httpx.get(f"{talking.url}/v1/models").json()["error"]["message"].startswith("no key: ")


def test_characters_of_several_tokens_are_streamed_whole(talking: SimpleNamespace, say: Say) -> None:
    text = "ab " + "日本語😀é" * 6
    prompts = say(text)
    pieces = [each.choices[0].delta.content or "" for each in chat(talking, stream=True)]
    assert "".join(pieces) == text and len(prompts) > 2 and not any("\ufffd" in piece for piece in pieces)
    assert sum(bool(piece) for piece in pieces) > 2


def test_a_text_is_streamed_as_text_with_one_reason(talking: SimpleNamespace, say: Say) -> None:
    say("one two three four five six seven eight nine")
    asked: Any = {"model": talking.name, "prompt": "1+2", "max_tokens": 200}
    pieces = list(talking.door.completions.create(stream=True, **asked))
    assert "".join(each.choices[0].text for each in pieces) == "one two three four five six seven eight nine"
    assert [each.choices[0].finish_reason for each in pieces] == [None] * (len(pieces) - 1) + ["stop"]
    assert {each.object for each in pieces} == {"text_completion"} and len({each.id for each in pieces}) == 1


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ({}, 16),
        ({"max_tokens": 3}, 3),
        ({"extra_body": {"max_completion_tokens": 2}, "max_tokens": 5}, 2),
        ({"max_tokens": None}, 16),
    ],
    ids=str,
)
def test_a_completion_has_sixteen_tokens_where_nobody_says_how_many(
    options: dict[str, Any], tokens: int, talking: SimpleNamespace, say: Say
) -> None:
    say("word " * 100)
    found = talking.door.completions.create(model=talking.name, prompt="1+2", **options)
    assert found.usage.completion_tokens == tokens and found.choices[0].finish_reason == "length"
    prompt = talking.tokenizer.encode("1+2")
    assert (found.usage.prompt_tokens, found.usage.total_tokens) == (len(prompt), len(prompt) + tokens)


def test_a_chat_has_all_of_the_model_s_room_where_nobody_says_how_much(talking: SimpleNamespace, say: Say) -> None:
    say("word " * 400)
    found = chat(talking, max_tokens=None)
    assert found.usage.total_tokens == 256 and found.choices[0].finish_reason == "length"


def test_messages_are_told_to_templates_in_their_form() -> None:
    called = {"id": "x", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    for given, told in (
        ({"role": "user", "content": "a"}, {"role": "user", "content": "a"}),
        ({"role": "user"}, {"role": "user", "content": ""}),
        ({"role": "user", "content": []}, {"role": "user", "content": ""}),
        ({"content": [{"type": "text", "text": "a"}, {"type": "text"}, {"type": "text", "text": "b"}]}, {"content": "ab"}),
        ({"content": None, "tool_calls": None}, {"content": "", "tool_calls": None}),
        (
            {"content": None, "tool_calls": [called, {**called, "function": {"name": "g", "arguments": {"b": 2}}}]},
            {
                "content": "",
                "tool_calls": [
                    {**called, "function": {"name": "f", "arguments": {"a": 1}}},
                    {**called, "function": {"name": "g", "arguments": {"b": 2}}},
                ],
            },
        ),
    ):
        assert _message(given) == told
    assert _function({"name": "f", "arguments": ""}) == {"name": "f", "arguments": {}}
    with pytest.raises(BatchError, match="messages: 'x' is no object"):
        _message("x")


def test_of_tokens_that_look_the_same_the_likeliest_is_shown() -> None:
    assert _by_text([("a", -1.0), ("b", -2.0), ("a", -3.0)]) == {"a": -1.0, "b": -2.0} and _by_text([]) == {}
    assert _token("é", -1.0) == {"token": "é", "logprob": -1.0, "bytes": [195, 169]}


def test_why_a_text_ended_is_told_in_openai_s_words() -> None:
    calls: Any = [SimpleNamespace(name="f", arguments={"x": 1})]
    for finish, attempts, reason in (
        ("stop", (), "stop"),
        ("length", (), "length"),
        ("abort", (), "length"),
        ("stop", calls, "tool_calls"),
    ):
        assert _reason(finish, ParsedTurn("text", attempts)) == reason
    told = _assistant(ParsedTurn("", calls * 2))
    assert told["content"] is None and [each["index"] for each in told["tool_calls"]] == [0, 1]
    assert told["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"x": 1}'}
    assert len({each["id"] for each in told["tool_calls"]}) == 2
    assert _assistant(ParsedTurn("")) == {"role": "assistant", "content": ""}


def test_a_text_is_cut_at_the_first_of_its_ends(talking: SimpleNamespace) -> None:
    model: Any = SimpleNamespace(name="m")
    for ends, cut in (((), "a b c d"), (("x",), "a b c d"), (("c", "b"), "a "), (("d", "a"), ""), ((" d",), "a b c")):
        assert _Answer(talking.server, model, "m", ends, has_tools=False, chat=False)._cut("a b c d") == cut


def test_two_texts_that_end_differently_say_so_each(talking: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = talking.tokenizer.encode("one two", add_special_tokens=False)
    drawn = iter((Generation(ids, [-0.5] * len(ids), "length", [0] * len(ids)), Generation(ids[:1], [-0.25], "stop", [0])))
    monkeypatch.setattr(TorchEngine, "generate", lambda *_: next(drawn))
    found = talking.door.completions.create(model=talking.name, prompt=[5, 6], n=2, logprobs=0, echo=False)
    shown = sorted((each.finish_reason, each.logprobs.token_logprobs) for each in found.choices)
    assert shown == [("length", [-0.5] * len(ids)), ("stop", [-0.25])]
    assert [each.index for each in found.choices] == [0, 1] and found.usage.completion_tokens == len(ids) + 1
    assert all(each.logprobs.top_logprobs is None for each in found.choices)
    for each in found.choices:
        assert "".join(each.logprobs.tokens) == each.text
        assert each.logprobs.text_offset == [
            sum(map(len, each.logprobs.tokens[:at])) for at in range(len(each.logprobs.tokens))
        ]


def test_a_failure_of_the_server_is_an_object_of_openai_s_too(
    talking: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("no")

    monkeypatch.setattr("actors.serve.openai._names", fails)
    with pytest.raises(openai.InternalServerError, match="RuntimeError: no") as failed:
        talking.door.models.list()
    assert failed.value.code == "500"
