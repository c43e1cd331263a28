"""The configuration file: read whole or refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from strata_proxy.app import create_app
from strata_proxy.cli import main
from strata_proxy.config import Config, ConfigError, load_config

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
TEXTS = ("host", "engine", "model_name", "chat_template", "log_level")


def written(path: Path, text: str) -> Path:
    file = path / "config.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def test_no_file_gives_the_defaults():
    assert load_config(None) == Config(host="127.0.0.1", port=8080, engine="/tmp/strata.sock")


def test_empty_file_gives_the_defaults(tmp_path):
    assert load_config(written(tmp_path, "# nothing\n")) == Config()


def test_command_line_wins_over_the_file(tmp_path):
    file = written(tmp_path, "port: 9000\nhost: 0.0.0.0\nsampling: {temperature: 0.7}\n")
    config = load_config(file, {"port": 9001, "host": None})
    assert (config.port, config.host, config.sampling) == (9001, "0.0.0.0", {"temperature": 0.7})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot: 8080", ["prot", "8080"]),
        ("port: eighty", ["port", "eighty"]),
        ("port: true", ["port", "true"]),
        ("port: 70000", ["port", "70000"]),
        ("host: 1", ["host", "1"]),
        ("host:", ["host", "null"]),
        ("strict_model: 1", ["strict_model", "1"]),
        ("api_keys: secret", ["api_keys", "secret"]),
        ("api_keys: ['']", ["api_keys"]),
        ("keepalive_s: .nan", ["keepalive_s", "NaN"]),
        ("log_level: loud", ["log_level", "loud"]),
        ("sampling: 1", ["sampling", "1"]),
        ("sampling: {temprature: 0.7}", ["sampling", "temprature", "0.7"]),
        ("sampling: {temperature: '0.7'}", ["sampling", "temperature", '"0.7"']),
        ("sampling: {top_k: 100}", ["sampling", "top_k", "100"]),
        ("sampling: {top_p: .inf}", ["sampling", "top_p", "Infinity"]),
        ("port: 1\nport: 2", ["port", "twice"]),
        ("sampling: {top_p: 0.5, top_p: 0.6}", ["top_p", "twice"]),
        ("1: 2", ["1"]),
        ("- port", ["port"]),
        ("port: [", ["config.yaml"]),
        *[(f"{name}: {value}", [name]) for name in TEXTS for value in ("''", "' '", '"a\\0b"', '"a\\nb"')],
        ("api_keys: [' ']", ["api_keys"]),
        ("cors_origins: ['']", ["cors_origins"]),
        ("port: " + "[" * 3000, ["config.yaml", "nested too deep"]),
        ("sampling: " + "{a: " * 3000, ["config.yaml", "nested too deep"]),
        ("port: !!timestamp x", ["config.yaml"]),
        ("port: !!bool x", ["config.yaml"]),
        ("port: !!int ''", ["config.yaml"]),
        ("port: &a [*a]", ["port"]),
        ("port: !!python/object/apply:os.getcwd []", ["config.yaml"]),
    ],
)
def test_refused_naming_key_and_value(tmp_path, text, words):
    with pytest.raises(ConfigError) as caught:
        load_config(written(tmp_path, text))
    assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "given"),
    [("port: eighty", {"port": 80}), ("host: ''", {"host": "::1"}), ("log_level: loud", {"log_level": "info"})],
)
def test_the_command_line_hides_no_fault_of_the_file(tmp_path, text, given):
    with pytest.raises(ConfigError, match=next(iter(given))):
        load_config(written(tmp_path, text), given)


@pytest.mark.parametrize("option", ["--host", "--engine"])
def test_cli_refuses_an_empty_text(capsys, monkeypatch, option):
    monkeypatch.setattr("strata_proxy.serving.run", lambda config: None)
    assert main([option, ""]) == 2
    assert option.removeprefix("--") in capsys.readouterr().err


@pytest.mark.parametrize("host", ["a" * 300, "a..b"])
def test_cli_refuses_a_host_that_is_no_name(capsys, host):
    assert main(["--host", host, "--port", "0"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("strata-proxy: cannot listen on ")


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{% for %}", "line 1: Expected an expression, got 'end of statement block'"),
        ("a\n{{ 1 | nothing }}", "line 2: No filter named 'nothing'."),
        ("{% include", "line 1: "),
        ("", "it is empty"),
        (" \n", "it is empty"),
        ("{{ " + "(" * 3000, ""),
    ],
)
def test_a_broken_chat_template_stops_the_start(tmp_path, source, why):
    file = tmp_path / "chat.jinja"
    file.write_text(source, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        create_app(load_config(written(tmp_path, f"chat_template: {file}")))
    said = str(caught.value)
    assert said.startswith(f"the chat template (chat_template) {file} cannot be used: {why}") and "\n" not in said


def test_cli_refuses_a_bad_file_in_one_line(tmp_path, capsys):
    assert main(["--config", str(written(tmp_path, "sampling: {temprature: 0.7}"))]) == 2
    error = capsys.readouterr().err
    assert "temprature" in error and "0.7" in error and error.count("\n") == 1


def test_cli_refuses_a_missing_file(tmp_path, capsys):
    file = tmp_path / "none.yaml"
    assert main(["--config", str(file)]) == 2
    said = f"strata-proxy: cannot read the configuration {file}: no such file or directory\n"
    assert capsys.readouterr().err == said


def test_cli_refuses_a_folder(tmp_path, capsys):
    assert main(["--config", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"strata-proxy: cannot read the configuration {tmp_path}: is a directory\n"


def test_cli_refuses_a_missing_chat_template(tmp_path, capsys):
    assert main(["--config", str(written(tmp_path, "chat_template: none.jinja"))]) == 2
    said = "cannot read the chat template (chat_template) none.jinja: no such file or directory\n"
    assert capsys.readouterr().err.endswith(said)


def test_there_are_example_configs():
    assert {"default.yaml", "deterministic.yaml", "creative.yaml", "behind-nginx.yaml"} <= {f.name for f in CONFIGS}


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.name)
def test_example_configs_load(file):
    load_config(file)


def test_default_config_shows_every_key_at_its_default():
    text = (CONFIGS[0].parent / "default.yaml").read_text(encoding="utf-8")
    shown = "\n".join(line.removeprefix("#") for line in text.splitlines() if not line.startswith("# "))
    values = yaml.safe_load(shown)
    assert set(values) == set(Config.__dataclass_fields__)
    del values["sampling"]
    for name, value in values.items():
        default = getattr(Config(), name)
        assert value == (list(default) if isinstance(default, tuple) else default), name
