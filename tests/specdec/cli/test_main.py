import io
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from specdec.cli.main import main
from specdec.errors import ConfigError
from tests.specdec.cli.conftest import Run
from tests.support.tiny_checkpoint import tiny_spec, write_tiny_checkpoint

# Where the tests run in the background, their children would be deaf to SIGINT.
COMMAND = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from specdec.cli.main import run; run()"
)


def test_help_names_the_commands(run: Run) -> None:
    for arguments in ((), ("--help",)):
        outcome = run(*arguments)
        assert outcome.exit_code == 0
        assert all(name in outcome.out for name in ("generate", "score", "inspect", "plan", "demo"))


def test_help_does_not_load_torch() -> None:
    script = "import sys; from specdec.cli.main import main; main(['generate', '-h']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "--top-p" in done.stdout
    assert done.stdout.endswith("False\n")


def test_the_version_is_printed(run: Run) -> None:
    outcome = run("--version")
    assert outcome.exit_code == 0
    assert outcome.out.startswith("specdec 0.")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["destroy"], "No such command 'destroy' (see specdec --help)"),
        (["generate", "--model", "glm-tiny", "--top-z", "1"], "No such option: --top-z"),
        (["generate", "--prompt", "a"], "Missing option '--model' (see specdec generate --help)"),
        (["generate", "--model", "glm-tiny", "--prompt", "a", "--top-k", "many"], "'--top-k'"),
        (["generate", "--model", "glm-tiny"], "give exactly one of --prompt"),
        (["generate", "--model", "glm-tiny", "--prompt", "a", "--logit-bias", "1"], "--logit-bias takes ID:VALUE"),
        (["generate", "--model", "glm-tiny", "--prompt", "a", "--logit-bias", "1:x"], "got '1:x'"),
        (["generate", "--model", "glm-tiny", "--prompt", "a", "--temperature", "-1"], "temperature must be in 0..100"),
        (["generate", "--model", "glm-9", "--prompt", "a"], "model 'glm-9' is neither"),
        (["generate", "--model", "glm-5.2", "--prompt", "a"], "has no weights here"),
        (
            ["generate", "--model", "glm-tiny", "--prompt", "a", "--device", "cuda:99"],
            "device cuda:99 cannot be used here: ",
        ),
        (["generate", "--model", "glm-tiny", "--prompt", "a", "--dtype", "float8"], "dtype must be one of"),
        (["generate", "--model", "glm-tiny", "--prompt", "a", "--kv-format", "fp8"], "kv_scale"),
        (["generate", "--model", "glm-tiny", "--prompt", "a", "--kv-format", "fp4"], "kv_format must be one of"),
        (["generate", "--model", "glm-tiny", "--prompt", "a", "--page-size", "0"], "page_size"),
        (["generate", "--model", "glm-tiny", "--prompt", "a", "--speculative-eagle-topk", "2"], "must be 1"),
        (["generate", "--model", "glm-tiny", "--prompt", ""], "the prompt is empty"),
        (["generate", "--model", "glm-tiny", "--prompt", "a\udcff"], "lone surrogate"),
        (["generate", "--model", "glm-tiny", "--prompt-ids", "1,99999"], "got 99999"),
        (["generate", "--model", "glm-tiny", "--prompt-ids", "1", "--banned-token-ids", "99999"], "99999"),
        (["generate", "--model", "glm-tiny", "--prompt", "a", "--stream", "--n", "2"], "n is 2"),
        (
            ["generate", "--model", "glm-tiny", "--prompt", "a", "--device", "meta"],
            "meta cannot be used here: it holds no",
        ),
        (["generate", "--model", "glm-tiny", "--prompt", "a b " * 10**5], "characters, so at least"),
        (["generate", "--model", "glm-tiny", "--prompt-ids", "1" * 5000], "--prompt-ids takes token ids"),
        (
            ["generate", "--model", "glm-tiny", "--prompt", "a", "--stop-token-ids", "1" * 5000],
            "--stop-token-ids takes",
        ),
        (["generate", "--model", "glm-tiny", "--prompt", "a", "--logit-bias", "1" * 5000 + ":1"], "--logit-bias takes"),
        (["generate", "--model", "glm-tiny", "--prompt", "a", "--logit-bias", "42:nan"], "logit_bias[42] must be in"),
        (
            ["generate", "--model", "glm-tiny", "--prompt", "a", "--kv-format", "fp8", "--kv-scale", "-1"],
            "kv_scale must be in 1e-30..1e+30, got -1",
        ),
        (
            ["generate", "--model", "glm-tiny", "--prompt", "a", "--kv-format", "fp8", "--kv-scale", "1e300"],
            "kv_scale must be in 1e-30..1e+30, got 1e+300",
        ),
        (["score", "--model", "glm-tiny", "--ids", "1,b"], "--ids takes token ids"),
        (["score", "--model", "glm-tiny", "--ids", "1,2", "--logits", ""], "--logits takes the name of a file"),
        (["score", "--model", "glm-tiny", "--ids", "1,2", "--logits", "/"], "--logits takes the name of a file"),
        (["score", "--model", "glm-tiny", "--ids", "1,2", "--logits", "/nowhere/x.npz"], "no directory /nowhere"),
        (["score", "--model", "glm-tiny", "--ids", ""], "the prompt is empty"),
        (["demo", "--max-tokens", "1000000"], "--max-tokens must be at most"),
        (["inspect", "glm-9"], "model 'glm-9' is neither"),
    ],
)
def test_what_cannot_be_served_is_one_line_and_exit_code_2(run: Run, arguments: list[str], message: str) -> None:
    outcome = run(*arguments)
    lines = [line for line in outcome.err.splitlines() if not line.startswith("loaded ")]
    assert outcome.exit_code == 2
    assert outcome.out == ""
    assert len(lines) == 1
    assert lines[0].startswith("specdec: ")
    assert message in lines[0]


def test_a_damaged_checkpoint_is_exit_code_3(run: Run, tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path, tiny_spec())
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    outcome = run("generate", "--model", path, "--prompt", "a")
    assert outcome.exit_code == 3
    assert outcome.err.count("\n") == 1
    assert "model.safetensors" in outcome.err


def test_a_checkpoint_without_mtp_layer_says_how_to_go_on(run: Run, tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path, tiny_spec(mtp=False))
    refused = run("generate", "--model", path, "--prompt", "a")
    assert refused.exit_code == 2
    assert "--num-draft-tokens 0" in refused.err
    arguments = ("generate", "--model", path, "--prompt", "a", "--max-tokens", 2, "--num-draft-tokens", 0)
    assert run(*arguments).exit_code == 0


def test_anything_else_is_exit_code_1(run: Run, model: str) -> None:
    outcome = run("score", "--model", model, "--ids", "1,2", "--logits", "/dev/full")
    assert outcome.exit_code == 1
    assert outcome.err.count("\n") == 1
    assert "No space left on device" in outcome.err


def test_a_traceback_is_shown_on_request_wherever_it_is_asked_for(run: Run) -> None:
    arguments = ("generate", "--model", "nowhere", "--prompt", "a")
    for given in (("--traceback", *arguments), (*arguments, "--traceback")):
        with pytest.raises(ConfigError, match="model 'nowhere' is neither"):
            run(*given)


@pytest.mark.parametrize(
    "command", [("generate", "--model", "glm-tiny", "-"), ("score", "--model", "glm-tiny", "--ids", "-")]
)
def test_standard_input_that_is_closed_or_no_text_is_named(
    run: Run, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.setattr("sys.stdin", None)
    outcome = run(*command)
    assert (outcome.exit_code, outcome.err.count("\n")) == (2, 1)
    assert "standard input is closed" in outcome.err
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"1\xff")))
    outcome = run(*command)
    assert (outcome.exit_code, outcome.err.count("\n")) == (2, 1)
    assert "standard input must be UTF-8, got byte 0xff at offset 1" in outcome.err


def test_closed_standard_output_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout", None)
    assert main(["--version"]) == 1
    assert capsys.readouterr().err == "specdec: standard output is closed: nothing could be printed\n"


def started(*arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", COMMAND, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


STREAM = ("generate", "--model", "glm-tiny", "--prompt", "def f(", "--max-tokens", "1500", "--ignore-eos", "--stream")


def test_ctrl_c_while_modules_are_imported_ends_without_a_message() -> None:
    script = """
import sys
class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            raise KeyboardInterrupt
from specdec.cli.main import run
sys.meta_path.insert(0, Interrupts())
run()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_closed_pipe_ends_without_a_message() -> None:
    process = started(*STREAM, "--json")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=120) == 1
    assert process.stderr.read() == b""
    process.stderr.close()


def test_ctrl_c_ends_without_a_message() -> None:
    process = started(*STREAM, "--json")
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert err == b""
