"""Proof: the Debian package installed in a clean root gives a working command, man pages and completion.

    python tests/prove/deb_clean_root.py [--deb FILE] [--without demo] [--keep]

Builds the package unless one is named, makes the smallest Debian 12 with debootstrap in a temporary directory, and does
there what a user would: installs the package with its dependencies from Debian, asks for its version, runs `doctor`,
reads every man page through groff with all warnings, presses TAB in bash, zsh and fish, runs the demo, has lintian look
at the package, and removes it. Prints JSON Lines, one per part; exits with 1 if one fails. Run as root, from the
checkout.
"""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from _clean_root import ENVIRONMENT, Proof, apt, bootstrap, install, main, tail, there

SHELLS = ("bash-completion", "zsh", "fish")
KEYS_S = 60.0
UNSEEN = re.compile(r"\x1b(\[[0-9;?]*[a-zA-Z]|[=>])|[\x07\r]")

Part = Callable[[Path], dict[str, object]]


# The parts, in their order. Each returns what it found; `ok` says whether that is as it should be.


def nothing_runs(root: Path) -> dict[str, object]:
    commands = [path.read_bytes().replace(b"\0", b" ").decode() for path in root.glob("proc/[0-9]*/cmdline")]
    running = [each for each in commands if "swerve" in each and "deb_clean_root" not in each]
    enabled = [str(path) for path in (root / "etc/systemd").rglob("*swerve*")]
    return {"ok": not running and not enabled, "running": running, "enabled": enabled}


def version(root: Path) -> dict[str, object]:
    started = time.monotonic()
    done = there(root, "swerve", "--version")
    wanted = re.search(r"swerve_([^_]+)_", next(root.glob("swerve_*.deb")).name)
    ok = done.returncode == 0 and wanted is not None and wanted[1] in done.stdout
    return {"ok": ok, "said": done.stdout.strip() or tail(done), "ms": round((time.monotonic() - started) * 1e3)}


def doctor(root: Path) -> dict[str, object]:
    done = there(root, "swerve", "doctor", "-j")
    results = {each["name"]: each for each in json.loads(done.stdout)["results"]}
    missing = [name for name, each in results.items() if each["present"] is False]
    essential = [name for name in missing if results[name]["essential"]]
    ok = done.returncode == 0 and not essential and "Traceback" not in done.stderr
    programs = results["our programs"]["detail"]
    return {"ok": ok, "checks": len(results), "essential_missing": essential, "missing": missing, "programs": programs}


def manual(root: Path) -> dict[str, object]:
    apt(root, "install", "man-db")
    pages = sorted(path.relative_to(root) for path in (root / "usr/share/man").glob("man?/swerve*"))
    found = there(root, "man", "-w", "swerve")
    named = [there(root, "man", "-w", "5", name).returncode for name in ("swerve-agent", "swerve-policy")]
    warned = []
    for page in pages:
        done = there(root, "man", "--warnings", "-E", "UTF-8", "-l", "-Tutf8", "-Z", f"/{page}")
        if done.returncode != 0 or done.stderr:
            warned.append(f"{page}: {done.stderr[:200]}")
    ok = found.returncode == 0 and found.stdout.strip().endswith("swerve.1.gz") and not any(named) and not warned
    return {"ok": ok and len(pages) > 40, "pages": len(pages), "where": found.stdout.strip(), "warnings": warned}


def completion(root: Path) -> dict[str, object]:
    apt(root, "install", *SHELLS)
    (root / "root/.zshrc").write_text("autoload -Uz compinit && compinit -u\nPS1='$ '\n")
    typed = {
        "bash": pressed(root, ["bash", "--login", "-i"], "swerve del\t", "swerve delay"),
        "bash, nested": pressed(root, ["bash", "--login", "-i"], "swerve steer drai\t", "swerve steer drain"),
        "zsh": pressed(root, ["zsh", "-i"], "swerve del\t", "swerve delay"),
    }
    fish = there(root, "fish", "-c", 'complete -C "swerve del"')
    typed["fish"] = {"ok": fish.stdout.startswith("delay\t"), "said": fish.stdout.strip() or tail(fish)}
    return {"ok": all(each["ok"] for each in typed.values()), **typed}


def pressed(root: Path, shell: list[str], keys: str, wanted: str) -> dict[str, object]:
    """Type at a shell on a terminal of its own, and wait for what the line becomes."""
    main, sub = pty.openpty()
    process = subprocess.Popen(
        ["chroot", root, *shell], stdin=sub, stdout=sub, stderr=sub, env=ENVIRONMENT, start_new_session=True, cwd="/"
    )
    os.close(sub)
    try:
        shown = read_until(main, r"[#$%] $")
        os.write(main, keys.encode())
        started = time.monotonic()
        shown = read_until(main, re.escape(wanted) + r"\b")
    except (OSError, TimeoutError) as error:  # the shell is gone, or says something else
        return {"ok": False, "said": str(error)}
    finally:
        process.kill()
        process.wait()
        os.close(main)
    return {"ok": True, "ms": round((time.monotonic() - started) * 1e3), "said": shown.strip().splitlines()[-1]}


def read_until(terminal: int, pattern: str) -> str:
    """What is shown, without colours and bells, once the pattern is in it."""
    seen, end = "", time.monotonic() + KEYS_S
    while not re.search(pattern, seen):
        if not select.select([terminal], [], [], max(0.0, end - time.monotonic()))[0]:
            raise TimeoutError(f"no {pattern!r} in {seen[-300:]!r}")
        seen = UNSEEN.sub("", seen + os.read(terminal, 4096).decode(errors="replace"))
    return seen


def sample(root: Path) -> dict[str, object]:
    """The sample, put where it belongs, is what `doctor` finds; writable by others, it is refused."""
    place = root / "etc/swerve/agent.yaml"
    shutil.copy(root / "usr/share/doc/swerve/examples/agent.yaml", place)
    told = []
    for mode in (0o644, 0o666):
        place.chmod(mode)
        done = there(root, "swerve", "doctor", "-j")
        told += [each for each in json.loads(done.stdout)["results"] if each["name"] == "configuration"]
    place.unlink()
    good, bad = told
    return {
        "ok": good["present"] and not bad["present"] and "writable by everybody" in bad["detail"],
        "said": bad["detail"],
    }


def demo(root: Path) -> dict[str, object]:
    done = apt(root, "install", "iperf3")
    done = there(root, "swerve", "demo", "-j")
    if done.returncode != 0:
        return {"ok": False, "said": tail(done)}
    shares = {each["name"]: round(each["goodput_share"], 2) for each in json.loads(done.stdout)["phases"]}
    return {"ok": shares["steered"] > shares["congested"], "of_offered": shares}


def lint(root: Path) -> dict[str, object]:
    apt(root, "install", "lintian")
    (package,) = root.glob("swerve_*.deb")
    done = there(root, "lintian", "--allow-root", "--no-cfg", "-E", "--tag-display-limit", "0", f"/{package.name}")
    kinds = [line[0] for line in done.stdout.splitlines() if re.match(r"[EWIPX]: ", line)]
    ok = done.returncode in (0, 1) and "E" not in kinds
    said = [line for line in done.stdout.splitlines() if line.startswith(("E:", "W:"))][:40]
    return {"ok": ok, "errors": kinds.count("E"), "warnings": kinds.count("W"), "said": said or done.stderr[:300]}


def remove(root: Path) -> dict[str, object]:
    for name in ("var/lib/swerve", "var/cache/swerve"):
        (root / name).mkdir(exist_ok=True)
    done = apt(root, "purge", "swerve")
    left = [str(path.relative_to(root)) for path in root.glob("usr/**/*swerve*")]
    left += [name for name in ("var/lib/swerve", "var/cache/swerve") if (root / name).exists()]
    return {"ok": done.returncode == 0 and not left, "left": left[:20], "said": tail(done) if done.returncode else ""}


PARTS: tuple[Part, ...] = (
    *(bootstrap, install, nothing_runs, version, doctor, manual, completion, sample, demo, lint, remove),
)


def inside(proof: Proof, root: Path, without: Sequence[str]) -> int:
    """All parts, in the namespaces; the first that fails to build the root ends it."""
    for part in PARTS:
        if part.__name__ not in without and not proof.part(part, root) and part in (bootstrap, install):
            break
    return proof.end()


if __name__ == "__main__":
    sys.exit(main(__file__, __doc__ or "", inside))
