"""``blink-ref generate`` as a process, with a fake engine and with the real one."""

import argparse
import json
import os
import re
import subprocess

import pytest
from fake_engine import scores
from processes import COMMAND, ENGINES, Bench

from blink_ref import arguments
from blink_ref.model.store import TINY
from blink_ref.model.tokenizer import Tokenizer
from blink_ref.nic.generate import Answer, request_parameters
from blink_ref.nic.parameters import Parameters
from blink_ref.ring.layout import TIME

PROMPT = "It is a truth — 😀"
MANY = 600
"""Tokens of an answer that takes many times as long as the longest pause between two looks at the outbox."""


@pytest.fixture
def fake(tmp_path):
    return Bench(tmp_path).fake()


@pytest.fixture(params=ENGINES)
def bench(request, tmp_path):
    return Bench(tmp_path, ENGINES[request.param])


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(TINY)


def test_text_goes_to_standard_output_and_one_summary_line_to_standard_error(bench):
    out, err = bench.run("generate", "--model", "tiny", "--max-tokens", str(MANY), "--ignore-eos", PROMPT)
    assert out.endswith("\n")
    assert re.fullmatch(
        r"\w+: first token after \d+ ms, [\d.]+ tokens/s, \d+% of the memory-bandwidth floor\n", err
    )
    assert bench.left() == []


def test_the_json_object_says_everything(bench, tokenizer):
    process = bench.start(
        "generate", "--model", "tiny", "--max-tokens", str(MANY), "--ignore-eos", "--json", PROMPT
    )
    out, err = process.communicate(timeout=120)
    said = json.loads(out)
    assert err == b""
    assert said["prompt_ids"] == tokenizer.encode(PROMPT)
    assert len(said["token_ids"]) == MANY
    assert said["text"] == tokenizer.decode(said["token_ids"])
    assert said["finish_reason"] == "length"
    assert said["model"] == "tiny"
    assert said["target"] in ("cpu", "cuda", "python")
    assert said["nic_pid"] == process.pid != said["engine_pid"]
    assert said["ttft_ms"] > 0
    assert said["tokens_per_s"] == pytest.approx(1000 / said["tpot_ms"])
    assert said["steps"] >= MANY - 1


def test_tokens_that_come_all_at_once_have_no_time_per_token():
    answer = Answer(submitted=1.0, token_ids=[1, 2, 3], first=2.0, last=2.0)
    assert answer.tpot is None
    answer.last = 3.0
    assert answer.tpot == 0.5


def test_the_same_text_comes_as_text_and_as_json(bench):
    arguments = ["generate", "--model", "tiny", "--max-tokens", "30", "She was"]
    text, _ = bench.run(*arguments)
    said = json.loads(bench.run(*arguments, "--json")[0])
    assert text.rstrip("\n") == said["text"].rstrip("\n")


def test_an_end_of_text_token_is_among_the_ids_and_not_in_the_text(tmp_path):
    bench = Bench(tmp_path).fake(answer=[43, 86, 0, 9])
    said = json.loads(bench.run("generate", "--model", "tiny", "--json", "x")[0])
    assert said["token_ids"] == [43, 86, 0]
    assert said["text"] == "It"
    assert said["finish_reason"] == "stop"
    said = json.loads(bench.run("generate", "--model", "tiny", "--max-tokens=5", "--ignore-eos", "--json", "x")[0])
    assert said["token_ids"] == [43, 86, 0, 9, 43]


def test_a_stop_id_ends_the_answer_but_not_before_min_tokens(tmp_path):
    arguments = ["generate", "--model", "tiny", "--json", "--stop-id", "86", "--stop-id", "9", "x"]
    bench = Bench(tmp_path).fake(answer=[43, 86, 9])
    said = json.loads(bench.run(*arguments)[0])
    assert (said["token_ids"], said["finish_reason"]) == ([43, 86], "stop")
    assert json.loads(bench.run(*arguments, "--min-tokens", "3")[0])["token_ids"] == [43, 86, 9]


def test_min_tokens_beyond_the_default_length_raise_it(fake):
    said = json.loads(fake.run("generate", "--model", "tiny", "--json", "--min-tokens", "200", "x")[0])
    assert len(said["token_ids"]) == 200


def test_log_probabilities_are_in_the_json_object_if_asked_for(tmp_path):
    bench = Bench(tmp_path).fake(answer=[43, 86])
    arguments = ["generate", "--model", "tiny", "--max-tokens", "2", "--json", "x"]
    assert json.loads(bench.run(*arguments)[0])["logprobs"] is None
    said = json.loads(bench.run(*arguments, "--logprobs", "2")[0])
    assert said["logprobs"] == [
        {"id": token, "logprob": own, "likeliest": [list(pair) for pair in likeliest]}
        for token in (43, 86)
        for own, likeliest in [scores(token, 2)]
    ]


def test_an_answer_whose_time_is_over_is_printed_as_far_as_it_came(tmp_path):
    bench = Bench(tmp_path).fake(answer=[43, 86], delay=0.05)
    arguments = ["generate", "--model", "tiny", "--max-tokens", "900", "--timeout", "0.4", "x"]
    said = json.loads(bench.run(*arguments, "--json")[0])
    assert said["finish_reason"] == "out of time"
    assert 0 < len(said["token_ids"]) < 20
    out, err = bench.run(*arguments)
    assert out.startswith("It")
    assert "first token after" in err


def test_an_answer_without_a_token_in_time_is_empty(tmp_path):
    bench = Bench(tmp_path).fake(refuse=TIME)
    said = json.loads(bench.run("generate", "--model", "tiny", "--json", "x")[0])
    assert (said["text"], said["token_ids"], said["ttft_ms"]) == ("", [], None)
    assert bench.run("generate", "--model", "tiny", "x") == ("\n", "python: no token came in time\n")


def test_every_sampling_argument_is_taken(fake):
    said = fake.run(
        *["generate", "--model", "tiny", "--max-tokens", "3", "--temperature", "0.8", "--seed", "7"],
        *["--top-k", "40", "--top-p", "0.9", "--min-p", "0.05", "--repetition-penalty", "1.1"],
        *["--presence-penalty=-0.5", "--frequency-penalty", "0.5", "--priority", "3", "--urgent", "--json", "x"],
    )
    assert len(json.loads(said[0])["token_ids"]) == 3


def test_the_arguments_of_a_request_become_its_parameters():
    parser = argparse.ArgumentParser()
    arguments.add_request(parser)
    words = (
        "--max-tokens 9 --min-tokens 2 --temperature 0.5 --seed 7 --top-k 40 --top-p 0.9 --min-p 0.05 --urgent "
        "--repetition-penalty 1.1 --presence-penalty 0.5 --frequency-penalty 0.25 --stop-id 5 --stop-id 6 "
        "--ignore-eos --logprobs 3 --priority 4 --timeout 1.5"
    )
    assert request_parameters(parser.parse_args(words.split()), 100) == Parameters(
        max_tokens=9,
        min_tokens=2,
        temperature=0.5,
        seed=7,
        top_k=40,
        top_p=0.9,
        min_p=0.05,
        urgent=True,
        repetition=1.1,
        presence=0.5,
        frequency=0.25,
        stop_ids=[5, 6],
        ignore_eos=True,
        logprobs=3,
        priority=4,
        time_ms=1500,
    )
    assert request_parameters(parser.parse_args([]), 100) == Parameters(max_tokens=100, stop_ids=[])


def test_one_token_has_no_time_per_token(fake):
    said = json.loads(fake.run("generate", "--model", "tiny", "--max-tokens", "1", "--json", "x")[0])
    assert said["tpot_ms"] is None
    assert said["tokens_per_s"] is None
    _, err = fake.run("generate", "--model", "tiny", "--max-tokens", "1", "x")
    assert re.fullmatch(r"python: first token after \d+ ms\n", err)


@pytest.mark.parametrize("prompt", ["a\r\nb\t c \n", "\x00\x7f", "é €", "\ufeffx", "<|im_end|>x"])
def test_standard_input_is_the_prompt_byte_for_byte(fake, tokenizer, prompt):
    arguments = ["generate", "--model", "tiny", "--max-tokens", "1", "--json", "-"]
    said = json.loads(fake.run(*arguments, stdin=prompt.encode())[0])
    assert said["prompt_ids"] == tokenizer.encode(prompt, allow_special=True)
    assert tokenizer.decode(said["prompt_ids"], skip_special=False) == prompt


def test_the_chat_template_takes_the_prompt_as_a_users_message(fake, tokenizer):
    said = json.loads(
        fake.run("generate", "--model", "tiny", "--max-tokens=1", "--chat", "--json", "hi<|im_end|>")[0]
    )
    assert said["prompt_ids"] == tokenizer.encode_chat([{"role": "user", "content": "hi<|im_end|>"}])


def test_without_max_tokens_the_answer_takes_what_fits_up_to_128(fake):
    said = json.loads(fake.run("generate", "--model", "tiny", "--json", "x")[0])
    assert len(said["token_ids"]) == 128
    long = "a b" * 500
    said = json.loads(fake.run("generate", "--model", "tiny", "--json", long)[0])
    assert len(said["prompt_ids"]) + len(said["token_ids"]) == 1024


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        ([""], 1, "the prompt is empty"),
        (["a b" * 1000], 1, "exceed the context of 1024"),
        (["x", "--max-tokens", "2000"], 1, "max_tokens 2000 exceed the context of 1024"),
        (["x", "--max-tokens", "0"], 2, "argument --max-tokens: 0 is too small; it must be at least 1"),
        (["x", "--max-tokens", "-1"], 2, "-1 is too small"),
        (["x", "--max-tokens", "many"], 2, "invalid integer value: 'many'"),
        (["x", "--temperature=-0.5"], 2, "argument --temperature: -0.5 is no temperature"),
        (["x", "--temperature", "nan"], 2, "nan is no temperature"),
        (["x", "--temperature", "1e30"], 1, "temperature is 1e+30; it must be between 0 and 1e+06"),
        (["x", "--top-k", "-1"], 2, "argument --top-k: -1 is too small; it must be at least 0"),
        (["x", "--top-p", "0"], 1, "top_p is 0.0; it must be between 0 and 1, and not 0"),
        (["x", "--top-p", "all"], 2, "argument --top-p: invalid number value: 'all'"),
        (["x", "--stop-id", "5000"], 1, "stop_ids has token id 5000; it must be one of the vocabulary"),
        (["x", "--stop-id", "the"], 2, "argument --stop-id: invalid integer value: 'the'"),
        (["x", "--min-tokens", "9", "--max-tokens", "8"], 1, "min_tokens is 9; it must not be more than"),
        (["x", "--logprobs", "2"], 1, "--logprobs are printed by --json only; add it"),
        (["x", "--timeout=-1"], 2, "argument --timeout: -1 is no time; it must be 0 (no limit) or more seconds"),
        (["x", "--timeout", "inf"], 2, "inf is no time"),
        (["x", "--timeout", "1e9"], 1, "time_ms is 1000000000000; it must be a whole number from 0 to 4294967295"),
        (["x", "--seed", "-1"], 2, "argument --seed: -1 is too small"),
        (["x", "--seed", str(2**64)], 1, "seed is 18446744073709551616"),
        (["x", "--target", "tpu"], 2, "argument --target: invalid choice: 'tpu'"),
        (["x", "--tokens", "5"], 2, "unrecognized arguments: --tokens"),
        ([], 2, "the following arguments are required: prompt"),
        (["x", "--model", "/nowhere"], 1, "there is no model '/nowhere'"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_starts_no_engine(tmp_path, arguments, code, complaint):
    bench = Bench(tmp_path, {"BLINK_REF_ENGINE": "/never/started"})
    out, err = bench.run("generate", "--model", "tiny", *arguments, code=code)
    assert out == ""
    assert err.startswith("blink-ref: error: ")
    assert complaint in err
    assert err.count("\n") == 1


def test_input_that_is_not_utf8_is_refused_with_its_place(fake):
    _, err = fake.run("generate", "--model", "tiny", "-", stdin=b"ab\xffc", code=1)
    assert err == "blink-ref: error: byte 2 of standard input, 0xff, is not UTF-8; convert it first\n"


def test_debug_shows_the_traceback(fake):
    _, err = fake.run("generate", "--model", "tiny", "--debug", "", code=1)
    assert "Traceback" in err
    assert "the prompt is empty" in err


@pytest.mark.parametrize(
    ("engine", "complaint"),
    [
        ({"BLINK_REF_ENGINE": "/nowhere/engine"}, "cannot start the engine /nowhere/engine (No such file"),
        ({"BLINK_REF_ENGINE": "false"}, "ended with exit code 1 before it served; its own messages are above"),
        ({"BLINK_REF_ENGINE": "sh -c 'kill -9 $$' --"}, "was killed by SIGKILL before it served"),
        ({"BLINK_REF_ENGINE": "echo hello"}, "the engine said b'hello --model"),
        ({"BLINK_REF_ENGINE": "sh -c 'echo 5'"}, "and not that it serves"),
    ],
)
def test_an_engine_that_does_not_come_to_serve_is_one_line(tmp_path, engine, complaint):
    _, err = Bench(tmp_path, engine).run("generate", "--model", "tiny", "x", code=1)
    assert err.startswith("blink-ref: error: ")
    assert complaint in err
    assert err.count("\n") == 1


def test_the_engines_own_error_is_passed_on(tmp_path):
    bench = Bench(tmp_path).fake(error="no room in /dev/shm; free some")
    assert bench.run("generate", "--model", "tiny", "x", code=1)[1] == (
        "blink-ref: error: no room in /dev/shm; free some\n"
    )


def test_a_request_that_the_engine_refuses_is_one_line(tmp_path):
    _, err = Bench(tmp_path).fake(refuse=5).run("generate", "--model", "tiny", "x", code=1)
    assert err == "blink-ref: error: the request failed: the KV cache can never hold it\n"


def test_two_commands_at_once_do_not_disturb_each_other(bench):
    arguments = ["generate", "--model", "tiny", "--max-tokens", "40", "--ignore-eos", "--json"]
    prompts = ["It was", "She had been"]
    alone = [json.loads(bench.run(*arguments, prompt)[0])["token_ids"] for prompt in prompts]
    both = [bench.start(*arguments, prompt) for prompt in prompts]
    assert [json.loads(process.communicate(timeout=120)[0])["token_ids"] for process in both] == alone
    assert bench.left() == []


def test_the_nic_process_imports_no_device_code_and_no_cuda(tmp_path):
    program = """
import sys
from blink_ref.cli import main
assert main(["generate", "--model", "tiny", "--max-tokens", "3", "x"]) == 0
import blink_ref.nic.app, blink_ref.nic.server
forbidden = ("numba", "cuda", "llvmlite", "blink_ref.simt", "blink_ref.kernels", "blink_ref.kvcache",
             "blink_ref.scheduler", "blink_ref.engine", "blink_ref.ring.device")
found = [name for name in sys.modules for prefix in forbidden if (name + ".").startswith(prefix + ".")]
assert not found, found
"""
    bench = Bench(tmp_path).fake()
    environment = {**os.environ, **bench.engine, "BLINK_REF_WINDOW_DIR": str(tmp_path)}
    subprocess.run([COMMAND[0], "-c", program], env=environment, check=True, capture_output=True)
