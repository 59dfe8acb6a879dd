"""Completion: a shell offers commands, options, names and files."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

import cli

BASH = shutil.which("bash")


def written(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(["completion", shell]) == 0
    return capsys.readouterr().out


def offered(script: str, folder: Path, *words: str) -> list[str]:
    """Return what bash offers for the last word of a command."""
    typed = " ".join(f"'{word}'" for word in words)
    asked = f"""{script}
COMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}; COMP_LINE="{" ".join(words)}"; COMP_POINT=${{#COMP_LINE}}
function=$(complete -p checkpoint-planner | sed 's/.*-F \\([^ ]*\\).*/\\1/')
$function; printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    ran = subprocess.run([str(BASH), "-c", asked], cwd=folder, capture_output=True, text=True, check=False)
    return ran.stdout.split()


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_both_shells_have_every_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    script = written(shell, capsys)
    for name in ("checkpoint-planner", "plan", "what-if", "--budget", "minigpt", "h100", "chain-dp"):
        assert name in script


@pytest.mark.skipif(BASH is None, reason="there is no bash")
def test_bash_offers_commands_options_names_and_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = written("bash", capsys)
    (tmp_path / "my.plan").touch()
    assert offered(script, tmp_path, "checkpoint-planner", "pl") == ["plan"]
    assert offered(script, tmp_path, "checkpoint-planner", "plan", "minig") == ["minigpt"]
    assert "--budget" in offered(script, tmp_path, "checkpoint-planner", "plan", "--bu")
    assert "h100" in offered(script, tmp_path, "checkpoint-planner", "plan", "minigpt", "--device", "h1")
    assert offered(script, tmp_path, "checkpoint-planner", "verify", "minigpt", "--plan", "my") == ["my.plan"]


def test_without_shtab_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("planner.commands.catalogue.find_spec", lambda name: None)
    assert cli.main(["completion", "bash"]) == 2
    assert "checkpoint-planner[completion]" in capsys.readouterr().err
