"""The command, as a process."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request

import pytest

from strata_proxy.cli import main

COMMAND = [sys.executable, "-m", "strata_proxy.cli"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serves_until_a_signal_and_ends_well(tmp_path, number):
    arguments = ["--port", "0", "--engine", str(tmp_path / "none.sock")]
    process = subprocess.Popen([*COMMAND, *arguments], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        line = next(line for line in process.stderr if "listening" in line)
        url = re.search(r"http://\S+", line)[0]
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(f"{url}/health", timeout=5)
        assert caught.value.code == 503
        caught.value.close()
        process.send_signal(number)
        out, _ = process.communicate(timeout=10)
        assert process.returncode == 0 and out == ""
    finally:
        process.kill()
        process.communicate()


def test_an_address_in_use_is_said_in_one_line(tmp_path, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["--port", str(port), "--engine", str(tmp_path / "none.sock")]) == 2
    said = capsys.readouterr().err
    assert said.splitlines()[-1] == (
        f"strata-proxy: cannot listen on 127.0.0.1:{port}: Address already in use; choose another --port or --host"
    )


def test_version(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0 and re.fullmatch(r"strata-proxy \d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_ctrl_c_before_it_serves_is_quiet():
    """Importing takes a moment; here it is interrupted at its heaviest part."""
    script = """
import builtins, sys
from strata_proxy import cli

real = builtins.__import__

def stop(name, *rest):
    if name == "aiohttp":
        raise KeyboardInterrupt
    return real(name, *rest)

builtins.__import__ = stop
sys.exit(cli.main([]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stderr) == (130, "")
