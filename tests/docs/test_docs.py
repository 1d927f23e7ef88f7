"""Every block of code in README.md and docs/ is run as it stands."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Pictures and signatures, not code.
NOT_CODE = ("", "text")
# The two commands of a fresh clone; .ci/run types them in one.
RUN_BY_CI = ("python3 -m venv .venv", "scripts/test")


def blocks() -> list[tuple[str, str, str]]:
    found = []
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for i, (language, code) in enumerate(FENCE.findall(page.read_text())):
            if language not in NOT_CODE:
                found.append((f"{page.relative_to(ROOT)}-{i}", language, code))
    return found


@pytest.mark.parametrize(("language", "code"), [b[1:] for b in blocks()], ids=[b[0] for b in blocks()])
def test_block_runs(language: str, code: str, smollm2_path: Path, tmp_path: Path) -> None:
    del smollm2_path  # the default model is there
    # Programs of this interpreter's environment come first, as in an activated one.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path}
    if language == "python":
        done = subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=tmp_path, env=environment, timeout=300)
        assert done.returncode == 0
        return
    assert language == "sh", f"no way to run a block of {language!r}"
    for line in code.strip().splitlines():
        if line.startswith(RUN_BY_CI):
            assert "README" in (ROOT / ".ci/run").read_text()
            continue
        words = shlex.split(line, comments=True)
        if words:
            done = subprocess.run(words, cwd=tmp_path, env=environment, timeout=300, stdin=subprocess.DEVNULL)
            assert done.returncode == 0, line


def test_ci_runs_the_two_commands() -> None:
    commands = [code for name, language, code in blocks() if name.startswith("README") and language == "sh"]
    assert commands[0].startswith("python3 -m venv") and commands[1].startswith("scripts/test")
