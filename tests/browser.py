"""A real Chromium without a screen, driven over WebDriver: pages opened, keys pressed, and every request it made.

Imported as `browser`; needs Debian's packages chromium and chromium-driver. One page at a time, a profile of its own
that is new and empty, and nothing in the background that would reach for the network.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal

KEYS: Final = {
    "tab": "\ue004",
    "enter": "\ue007",
    "escape": "\ue00c",
    "end": "\ue010",
    "home": "\ue011",
    "left": "\ue012",
    "right": "\ue014",
}
FLAGS: Final = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
    *("--force-color-profile=srgb", "--hide-scrollbars", "--force-device-scale-factor=1"),
)
_STARTED: Final = "was started successfully on port "
_LIMIT_S: Final = 60


def there() -> bool:
    """Whether both packages are installed."""
    return bool(shutil.which("chromium") and shutil.which("chromedriver"))


class Browser:
    """One session of a browser."""

    def __init__(self, address: str, profile: str, width: int, height: int) -> None:
        self._address = address
        options = {
            "args": [*FLAGS, f"--window-size={width},{height}", f"--user-data-dir={profile}"],
            "binary": shutil.which("chromium"),
        }
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"performance": "ALL", "browser": "ALL"},
        }
        told = self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._session = f"/session/{told['sessionId']}"
        self._call("POST", f"{self._session}/url", {"url": "about:blank"})  # else a page of its own is still loading
        self.requested()

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self._address + path, data, {"Content-Type": "application/json"}, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=_LIMIT_S) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{method} {path}: {error.read().decode()[:500]}") from None

    def open(self, page: Path) -> None:
        """Open a file, and wait until it is loaded."""
        self._call("POST", f"{self._session}/url", {"url": page.resolve().as_uri()})

    def run(self, script: str, *arguments: Any) -> Any:
        """What a script returns that runs in the page."""
        return self._call("POST", f"{self._session}/execute/sync", {"script": script, "args": list(arguments)})

    def devtools(self, command: str, **parameters: Any) -> Any:
        """A command of the browser's own protocol."""
        body = {"cmd": command, "params": parameters}
        return self._call("POST", f"{self._session}/goog/cdp/execute", body)

    def dress(self, scheme: Literal["light", "dark"]) -> None:
        """What the reader prefers."""
        self.devtools("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def press(self, *keys: str) -> None:
        """Press keys one after the other, by their names here or as they are."""
        actions = [{"type": kind, "value": KEYS.get(key, key)} for key in keys for kind in ("keyDown", "keyUp")]
        self._act({"type": "key", "id": "keyboard", "actions": actions})

    def point(self, x: float, y: float, *, press: bool = False, drag_to: tuple[float, float] | None = None) -> None:
        """Move the pointer there; click, or drag from there."""
        actions: list[dict[str, Any]] = [{"type": "pointerMove", "x": round(x), "y": round(y), "duration": 20}]
        if press or drag_to:
            actions.append({"type": "pointerDown", "button": 0})
        if drag_to:
            actions.append({"type": "pointerMove", "x": round(drag_to[0]), "y": round(drag_to[1]), "duration": 20})
        if press or drag_to:
            actions.append({"type": "pointerUp", "button": 0})
        self._act({"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}, "actions": actions})

    def _act(self, source: Mapping[str, Any]) -> None:
        self._call("POST", f"{self._session}/actions", {"actions": [source]})

    def log(self, kind: Literal["performance", "browser"]) -> list[dict[str, Any]]:
        """What was logged since the last look."""
        found: list[dict[str, Any]] = self._call("POST", f"{self._session}/se/log", {"type": kind})
        return found

    def requested(self) -> list[str]:
        """The addresses of everything that was asked for since the last look, whether or not it was let through."""
        events = [json.loads(each["message"])["message"] for each in self.log("performance")]
        return [each["params"]["request"]["url"] for each in events if each["method"] == "Network.requestWillBeSent"]

    def complaints(self) -> list[str]:
        """What the browser complained about since the last look: refusals of the policy, errors of scripts."""
        return [each["message"] for each in self.log("browser")]

    def picture(self) -> bytes:
        """What is to be seen, as PNG."""
        return base64.b64decode(self._call("GET", f"{self._session}/screenshot"))

    def close(self) -> None:
        """End the session, and with it the browser."""
        self._call("DELETE", self._session)


@contextlib.contextmanager
def browser(width: int = 1100, height: int = 900) -> Iterator[Browser]:
    """A browser; nothing of it is left afterwards."""
    with tempfile.TemporaryDirectory(prefix="swerve-browser-", ignore_cleanup_errors=True) as folder:
        profile, home = Path(folder, "profile"), Path(folder, "home")
        home.mkdir()
        driver = subprocess.Popen(
            ["chromedriver", "--port=0"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "HOME": str(home), "XDG_CONFIG_HOME": str(home), "XDG_CACHE_HOME": str(home)},
        )
        try:
            assert driver.stdout is not None
            port = next(line.partition(_STARTED)[2] for line in driver.stdout if _STARTED in line)
            one = Browser(f"http://127.0.0.1:{int(port.strip().rstrip('.'))}", str(profile), width, height)
            try:
                yield one
            finally:
                one.close()
        finally:
            driver.terminate()
            driver.communicate()
