"""Options: every field has a flag, a twin, a sentence of help; CLI beats environment beats default."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import pytest

from thermocline import options as opts
from thermocline.cli import environment, main
from thermocline.cli.commands.pack import PackOptions
from thermocline.cli.commands.profile_pack import ProfileOptions
from thermocline.cli.commands.run import RunOptions
from thermocline.errors import UsageError
from thermocline.server.http.limits import ServerLimits
from thermocline.session import options

OPTIONS = [command.options for command in main.COMMANDS.values()]
ALL = [(cls, f, o) for cls in OPTIONS for f, o in opts.options_of(cls)]
IDS = [f"{cls.__name__}.{f.name}" for cls, f, _ in ALL]

# What one may type for a field, and what it must become; a command's own meaning has its name in front.
EXAMPLES: dict[str, tuple[str, Any]] = {
    "model": ("some/dir", "some/dir"),
    "format": ("q4_0", "q4_0"),
    "activation": ("drelu", "drelu"),
    "cache_dir": ("/tmp/c", "/tmp/c"),
    "ctx_size": ("128", 128),
    "cache_type_k": ("q8_0", "q8_0"),
    "cache_type_v": ("q4_0", "q4_0"),
    "prompt_cache": ("1.5", 1.5),
    "prompt_cache_dir": ("/tmp/p", "/tmp/p"),
    "prompt_cache_disk": ("9", 9.0),
    "threads": ("3", 3),
    "sparsity": ("off", "off"),
    "system": ("Be brief.", "Be brief."),
    "template": ("t.jinja", "t.jinja"),
    "template_vars": ('{"a": 1}', {"a": 1}),
    "prompt": ("Once", "Once"),
    "file": ("p.txt", "p.txt"),
    "n_predict": ("7", 7),
    "stop": ("end", ("end",)),
    "ignore_eos": ("on", True),
    "seed": ("42", 42),
    "generation_config": ("off", "off"),
    "temp": ("0.5", 0.5),
    "top_k": ("3", 3),
    "top_p": ("0.9", 0.9),
    "min_p": ("0.1", 0.1),
    "repeat_penalty": ("1.1", 1.1),
    "repeat_last_n": ("-1", -1),
    "presence_penalty": ("-0.5", -0.5),
    "frequency_penalty": ("0.25", 0.25),
    "logit_bias": ("15+1.5", ((15, 1.5),)),
    "json_schema": ("{}", "{}"),
    "json_schema_file": ("s.json", "s.json"),
    "grammar": ('start: "x"', 'start: "x"'),
    "grammar_file": ("g.lark", "g.lark"),
    "n_best": ("3", 3),
    "logprobs": ("2", 2),
    "json": ("on", True),
    "display_prompt": ("off", False),
    "quiet": ("1", True),
    "source": ("src", "src"),
    "output": ("out", "out"),
    "force": ("true", True),
    "name": ("org/name", "org/name"),
    "yes": ("on", True),
    "disk": ("/tmp", "/tmp"),
    "shape": ("llama-2-7b", "llama-2-7b"),
    "gguf": ("m.gguf", "m.gguf"),
    "active": ("0.2", 0.2),
    "skew": ("0.43", 0.43),
    "routing": ("qwen3-30b", "qwen3-30b"),
    "activity": ("trained", "trained"),
    "depth": ("64", 64),
    "rank": ("96", 96),
    "BenchOptions.threads": ("1-3", (1, 2, 3)),
    "n_prompt": ("64,512", (64, 512)),
    "n_gen": ("0,2-3", (0, 2, 3)),
    "pg": ("8,4", ((8, 4),)),
    "n_depth": ("0-512+256", (0, 256, 512)),
    "repetitions": ("9", 9),
    "routes": ("t.csv", "t.csv"),
    "text": ("t.txt", "t.txt"),
    "trace": ("a.trace", "a.trace"),
    "replay": ("a.trace", "a.trace"),
    "policy": ("lfu,lru", ("lfu", "lru")),
    "budgets": ("4,6.5", (4.0, 6.5)),
    "limit": ("3", 3),
    "against": ("off", "off"),
    "output_format": ("jsonl", "jsonl"),
    "corpus": ("t.txt", ("t.txt",)),
    "tokens": ("99", 99),
    "ctx": ("256", 256),
    "kind": ("svd", "svd"),
    "max_kld": ("0.25", 0.25),
    "max_ppl": ("1.5", 1.5),
    "minutes": ("2.5", 2.5),
    "samples": ("0", 0),
    "workers": ("2", 2),
    "processes": ("2", 2),
    "ray": ("head:6379", "head:6379"),
    "replicas": ("3", 3),
    "undeploy": ("on", True),
    "plot": ("p.png", "p.png"),
    "predictor_share": ("0.1", 0.1),
    "PlanOptions.vram": ("24,10.5", (24.0, 10.5)),
    "gpu": ("off", "off"),
    "vram": ("11.5", 11.5),
    "hottest_first": ("1", True),
    "ram": ("64", 64.0),
    "read_budget": ("30", 30.0),
    "disable": ("cache,pipeline", ("cache", "pipeline")),
    "batch": ("4", 4),
    "hardware": ("hw.json", "hw.json"),
    "objective": ("frequency", "frequency"),
    "host": ("::1", "::1"),
    "port": ("0", 0),
    "socket": ("/tmp/s", "/tmp/s"),
    "api_key": ("k", ("k",)),
    "api_key_file": ("keys.txt", "keys.txt"),
    "insecure": ("on", True),
    "allow_host": ("box:80", ("box:80",)),
    "allow_origin": ("https://a.b", ("https://a.b",)),
    "models_dir": ("models", "models"),
    "models_max": ("2", 2),
    "alias": ("m", "m"),
    "parallel": ("3", 3),
    "access_log": ("on", True),
    "print_limits": ("on", True),
    "limit_header_bytes": ("300", 300),
    "limit_buffer_bytes": ("4096", 4096),
    "calibrate": ("text.txt", "text.txt"),
    "calibrate_tokens": ("1024", 1024),
    "importance": ("i.npz", "i.npz"),
    "predictors": ("dir", "dir"),
    "importance_out": ("o.npz", "o.npz"),
    "measure": ("text.txt", "text.txt"),
    "layers": ("2", 2),
}
EXAMPLES |= {f.name: ("9", 9) for f, _ in opts.options_of(ServerLimits) if f.name not in EXAMPLES}


def example(cls: type[Any], field: str) -> tuple[str, Any]:
    return EXAMPLES.get(f"{cls.__name__}.{field}") or EXAMPLES[field]


def read(cls: type[Any], argv: list[str], environ: dict[str, str] | None = None) -> Any:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    opts.add_arguments(parser, cls)
    return opts.read_options(cls, vars(parser.parse_args(argv)), environ or {})


def needed(cls: type[Any], but: str) -> list[str]:
    """Arguments that make the command line complete, without `but`."""
    return [
        a
        for f, o in opts.options_of(cls)
        if opts.REQUIRED in o.given and f.name != but
        for a in (opts.flag(f.name), "x")
    ]


@pytest.mark.parametrize(("cls", "f", "o"), ALL, ids=IDS)
def test_every_option_has_a_sentence_of_help_naming_its_twin(cls: Any, f: Any, o: opts.Option) -> None:
    assert o.help[0].isupper() or ":" in o.help
    assert o.help.endswith(".")
    parser = argparse.ArgumentParser()
    opts.add_arguments(parser, cls)
    assert opts.variable(f.name) in parser.format_help()


@pytest.mark.parametrize(("cls", "f", "o"), ALL, ids=IDS)
def test_every_option_reads_its_environment_twin(cls: Any, f: Any, o: opts.Option) -> None:
    text, value = example(cls, f.name)
    options = read(cls, needed(cls, but=f.name), {opts.variable(f.name): text})
    assert getattr(options, f.name) == value


@pytest.mark.parametrize(("cls", "f", "o"), ALL, ids=IDS)
def test_the_command_line_beats_the_environment(cls: Any, f: Any, o: opts.Option) -> None:
    text, value = example(cls, f.name)
    if o.parse is opts.switch:
        given, other = ["--" + ("" if value else "no-") + opts.flag(f.name)[2:]], "off" if value else "on"
    else:
        given, other = [opts.flag(f.name) + "=" + text], "not even valid \N{SNOWMAN}"
    options = read(cls, [*needed(cls, but=f.name), *given], {opts.variable(f.name): other})
    assert getattr(options, f.name) == value


@pytest.mark.parametrize(("cls", "f", "o"), [a for a in ALL if a[2].parse not in (str, opts.nonempty)])
def test_an_invalid_variable_is_refused_by_name(cls: Any, f: Any, o: opts.Option) -> None:
    with pytest.raises(UsageError, match=opts.variable(f.name)):
        read(cls, needed(cls, but=f.name), {opts.variable(f.name): "\N{SNOWMAN}"})


@pytest.mark.parametrize(
    "spelling",
    ["-n 5", "-n5", "--predict 5", "--n-predict 5", "--max-tokens 5", "--n-predict=5"],
)
def test_llama_cpp_spellings_of_the_token_count(spelling: str) -> None:
    assert read(RunOptions, spelling.split()).n_predict == 5


@pytest.mark.parametrize("spelling", ["-c 9", "--ctx-size 9", "--context-length 9", "--max-model-len 9"])
def test_llama_cpp_spellings_of_the_context(spelling: str) -> None:
    assert read(RunOptions, spelling.split()).ctx_size == 9


def test_several_files_may_follow_one_flag() -> None:
    argv = ["a pack", "--corpus", "a.txt", "b.txt", "--tokens", "9", "--corpus", "c.txt"]
    found = read(ProfileOptions, argv)
    assert (found.model, found.corpus, found.tokens) == ("a pack", ("a.txt", "b.txt", "c.txt"), 9)


def test_the_last_of_two_wins_and_repeated_options_gather() -> None:
    o = read(RunOptions, ["-s", "1", "--seed", "-1", "--stop", "a", "-r", "b", "-l", "1-2", "-l", "3-inf"])
    assert (o.seed, o.stop, o.logit_bias) == (-1, ("a", "b"), ((1, -2.0), (3, -math.inf)))


def test_a_repeated_options_variable_is_one_value_or_a_json_list() -> None:
    assert read(RunOptions, [], {"THERMOCLINE_STOP": '["a", "[b"]'}).stop == ("a", "[b")
    assert read(RunOptions, [], {"THERMOCLINE_STOP": "[INST]"}).stop == ("[INST]",)


def test_a_prompt_given_twice_is_refused() -> None:
    assert read(RunOptions, ["Once upon a time"]).prompt == "Once upon a time"
    with pytest.raises(UsageError, match="given twice"):
        read(RunOptions, ["Once", "-p", "upon"])


@pytest.mark.parametrize(
    "argv", [["-n", "0"], ["--temp", "nan"], ["--temp", "-1"], ["--top-p", "1.5"], ["-t", "x"]]
)
def test_values_out_of_range_name_the_flag_and_the_value(argv: list[str]) -> None:
    with pytest.raises(UsageError, match=argv[1]):
        read(RunOptions, argv)


@pytest.mark.parametrize("text", ["", "5", "+1", "5+", "5+nan", "5+inf", "x-1", "99999999999+1", "5-1-1"])
def test_a_malformed_logit_bias_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must look like"):
        opts.bias(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("64", (64,)),
        ("64,512,64", (64, 512, 64)),
        ("1-4", (1, 2, 3, 4)),
        ("10-20+4,7", (10, 14, 18, 7)),
        ("64-512*2", (64, 128, 256, 512)),
    ],
)
def test_lists_are_written_as_llama_bench_has_them(text: str, expected: tuple[int, ...]) -> None:
    assert opts.counts(0)(text) == expected


@pytest.mark.parametrize(
    "text", ["", "64,", "4-1", "0-8*2", "1-9+0", "1-9*1", "-3", "1-5000", "1 2", "\u0663"]
)
def test_lists_that_are_none_or_have_no_end_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must"):
        opts.counts(0)(text)


def test_a_missing_source_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="THERMOCLINE_SOURCE"):
        read(PackOptions, ["-o", "x"])


def test_unknown_variables_are_reported_and_a_bad_isa_is_refused() -> None:
    environ = {"THERMOCLINE_TMEP": "1", "THERMOCLINE_TEMP": "1", "THERMOCLINE_ISA": "avx2", "HOME": "/"}
    assert environment.check_environment(environ, OPTIONS) == ["THERMOCLINE_TMEP"]
    with pytest.raises(UsageError, match="THERMOCLINE_ISA"):
        environment.check_environment({"THERMOCLINE_ISA": "mmx"}, OPTIONS)


@pytest.mark.parametrize(
    ("platform", "environ", "expected"),
    [
        ("linux", {"XDG_CACHE_HOME": "/x"}, Path("/x/thermocline")),
        ("linux", {}, Path.home() / ".cache/thermocline"),
        ("darwin", {}, Path.home() / "Library/Caches/thermocline"),
        ("win32", {"LOCALAPPDATA": "/l"}, Path("/l/thermocline/cache")),
    ],
)
def test_the_cache_is_where_the_system_keeps_caches(
    platform: str, environ: dict[str, str], expected: Path
) -> None:
    assert options.default_cache_dir(environ, platform) == expected
