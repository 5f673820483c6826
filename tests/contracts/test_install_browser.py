"""`.ci/install-browser` on machines that are made up of a folder of programs: no apt-get of this machine is called."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from tests.support.shared_traces import ROOT

SCRIPT = ROOT / ".ci" / "install-browser"
NEEDED = ("bash", "env", "id", "grep", "head", "timeout", "chmod", "cat", "true")
REFUSES = 'echo "Reading lists"; echo "E: Unable to locate package ${@: -1}"; exit 100'
INSTALLS_NOTHING = "exit 0"
INSTALLS_THE_SECOND = """
[ "$1" = install ] || exit 1  # its lists cannot be fetched, and the old ones do
[ "${@: -1}" = chromium ] || exit 100
printf '#!/bin/bash\\nexit 0\\n' > "${0%/*}/chromium" && chmod +x "${0%/*}/chromium"
"""
STUB = "echo 'this needs a snap'; exit 1"
WORKS = "exit 0"


@pytest.mark.parametrize(
    ("programs", "code", "words"),
    [
        ({}, 1, "no apt-get"),
        ({"apt-get": REFUSES}, 1, "E: Unable to locate package chromium"),
        ({"apt-get": INSTALLS_NOTHING}, 1, "none of these runs"),
        ({"apt-get": INSTALLS_THE_SECOND}, 0, "chromium is installed"),
        ({"apt-get": REFUSES, "chromium-browser": STUB}, 1, "E: Unable to locate package"),
        ({"apt-get": INSTALLS_THE_SECOND, "chromium-browser": STUB}, 0, "chromium is installed"),
        (
            {"apt-get": REFUSES, "chromium-browser": STUB, "google-chrome": WORKS},
            0,
            "google-chrome is installed",
        ),
    ],
)
def test_it_says_what_runs_or_why_none_does(programs, code, words, tmp_path):
    for name in NEEDED:
        (tmp_path / name).symlink_to(shutil.which(name))
    everything = {"sudo": 'shift; exec "$@"', **programs}
    for name, body in everything.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        [shutil.which("bash"), SCRIPT],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code, done
    said = done.stdout + done.stderr
    assert words in said
    assert said.count("\n") == 1, "one line, whatever happens"
