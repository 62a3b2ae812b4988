"""The live view as an application of textual: keys, and when to draw; what is drawn comes from page.py.

Lines are read ten times a second, so that none is dropped for us; a frame is drawn once per interval, and after
each key. Orders are asked for on a thread of their own: an answer may take seconds.
"""

from __future__ import annotations

import asyncio
import signal
import time
from dataclasses import replace
from typing import Any, ClassVar, Final, Protocol

from rich.text import Text
from textual import events
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.driver import Driver

from pytools.errors import SwerveError
from pytools.views.actions import Mode
from pytools.views.top import feed, keys, orders
from pytools.views.top.canvas import Canvas, Prompt
from pytools.views.top.header import Around, Given
from pytools.views.top.keys import KEYS, Look, Panel
from pytools.views.top.page import Frame, draw
from pytools.views.top.state import Known

_READ_S: Final = 0.1  # the agent's socket holds so much of what it tells, and more (ipc/server.py)
_FIRST_S: Final = 0.3  # something to look at, soon
_MODE_S: Final = 1.0
_NOTICE_S: Final = 10.0
_SIGNALS: Final = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)


class Source(Protocol):
    """Where lines come from."""

    dropped: int

    def read(self) -> list[bytes]:
        """What has arrived."""

    def want(self, types: frozenset[str]) -> None:
        """Which types shall come."""


class Top(App[int]):
    """The live view of one agent."""

    ENABLE_COMMAND_PALETTE = False
    CSS: ClassVar[str] = """
    Screen { layout: vertical; overflow: hidden; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(key.keys, key.action, key.words, show=False, priority=key.action == "interrupt") for key in KEYS
    ]

    def __init__(self, source: Source, given: Given, driver: type[Driver] | None = None) -> None:
        super().__init__(driver_class=driver, ansi_color=True)
        self._source, self._given = source, given
        self.known = Known()  # what the agent has told
        self.frozen: tuple[Known, int] | None = None  # what is shown instead, and since when
        self.look = Look(every_s=given.every_s)  # what the person has chosen to see
        self.frame: Frame | None = None  # what is on the screen; None before the first
        self.frames = 0  # how often it was drawn
        self.failure: SwerveError | None = None  # why it ended
        self._notice: tuple[Text, float] | None = None  # and until when
        self._mode: Mode | None = None
        self._prompt: Prompt | None = None
        self._due_s = self._mode_due_s = 0.0
        self._spent = time.monotonic(), time.process_time()
        self._share: float | None = None

    def compose(self) -> ComposeResult:
        """Nothing but lines."""
        yield Canvas(self._given.color, self.show)

    def on_mount(self) -> None:
        self._source.want(feed.types_of(self.look.panel))
        if not self._given.timed:
            return
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._end, 128 + number)
        self.app_resume_signal.subscribe(self, lambda _: self.refresh(layout=True))  # the terminal has forgotten it all
        self._due_s = time.monotonic() + _FIRST_S
        self.run_worker(self._follow())

    async def _follow(self) -> None:
        """Read and draw until the end."""
        while True:
            self.turn()
            await asyncio.sleep(_READ_S)

    def _end(self, code: int) -> None:
        self.exit(code, code)

    def turn(self) -> None:
        """Take what has come, draw when it is time."""
        if self._given.is_gone():
            self._end(128 + signal.SIGHUP)
            return
        try:
            lines = self._source.read()
        except SwerveError as error:
            self.failure = error
            self._end(error.exit_code)
            return
        self.known.take(lines)
        now_s = time.monotonic()
        if now_s >= self._due_s:
            self._due_s = max(self._due_s + self.look.every_s, now_s)
            self.tick()

    def tick(self) -> None:
        self.show()
        self.frames += 1
        if self.frames == self._given.count:
            self._end(0)

    # ---- drawing ----

    def show(self) -> None:
        """Draw what is known, or what is frozen."""
        canvas = self.query_one(Canvas)
        size = canvas.size
        if not size.width or not size.height:
            return
        known = self.known if self.frozen is None else self.frozen[0]
        self.frame = draw(
            known,
            self.look,
            self._around(),
            size.width,
            size.height,
            self._given.glyphs,
            self._said(),
            self._given.allow_actions,
        )
        self.look = self.frame.look
        canvas.show(self.frame.lines)

    def _around(self) -> Around:
        now_ns = self._given.clock_ns()
        self._look_around()
        return Around(
            now_ns if self.frozen is None else self.frozen[1],
            int(self._given.up_s()),
            self._source.dropped,
            self._share,
            self._mode,
            None if self.frozen is None else now_ns - self.frozen[1],
            self._given.child,
        )

    def _look_around(self) -> None:
        """Once a second: who steers, and what this view costs."""
        now_s = time.monotonic()
        if not self._given.timed or now_s >= self._mode_due_s:
            self._mode_due_s = now_s + _MODE_S
            if self._given.steering is not None:
                try:
                    self._mode = self._given.steering.mode()
                except SwerveError as error:
                    self._mode = None
                    self._tell(str(error), "red")
            if self._given.timed and now_s - self._spent[0] >= _MODE_S:
                spent = now_s, time.process_time()
                self._share = (spent[1] - self._spent[1]) / (spent[0] - self._spent[0])
                self._spent = spent

    def _said(self) -> Text | None:
        if self._prompt is not None:
            return self._prompt.line(self.size.width)
        if self._notice is not None and time.monotonic() > self._notice[1]:
            self._notice = None
        return self._notice[0] if self._notice is not None else None

    def _tell(self, words: str, style: str = "bold") -> None:
        """Say something in the last line, for a while."""
        self._notice = Text(words.replace("\n", " "), style=style), time.monotonic() + _NOTICE_S

    def _looks(self, **changes: Any) -> None:
        self.look = replace(self.look, **changes)
        self.show()

    # ---- keys ----

    def action_leave(self) -> None:
        self._end(0)

    def action_interrupt(self) -> None:
        self._end(130)

    def action_help(self) -> None:
        """All keys; the same key again goes back."""
        self._looks(page="list" if self.look.page == "help" else "help", scroll=0)

    def action_panel(self, name: Panel) -> None:
        if name == "links" and self.look.panel == "links" and self.look.page == "list":
            name = "rdma"
        self._source.want(feed.types_of(name))
        self.look = Look(name, "list", self.look.horizon_s, self.look.every_s, asked=self.look.asked)
        self.show()

    def action_move(self, step: int) -> None:
        """Another row; in a page that is longer than the screen, lines."""
        if self.look.page != "list":
            self._looks(scroll=max(0, self.look.scroll + step))
            return
        self.look = replace(self.look, cursor=max(0, self.look.cursor + step), selected=None)
        self.show()
        self._select()

    def action_page(self, step: int) -> None:
        """As many rows as are seen at once."""
        self.action_move(step * (self.frame.page if self.frame is not None else 1))

    def _select(self) -> None:
        """Hold on to the row under the cursor, wherever it goes."""
        if self.frame is not None:
            self.look = replace(self.look, selected=self.frame.key)

    def action_shift(self, step: int) -> None:
        """Columns further left or right."""
        frame = self.frame
        if frame is not None and self.look.page == "list" and (step < 0 or frame.more):
            self._looks(shift=max(0, self.look.shift + step))

    def action_detail(self) -> None:
        """All about the selected row."""
        if self.look.page == "list" and self.frame is not None and self.frame.row is not None:
            self._select()
            self._looks(page="detail", scroll=0)

    async def action_back(self) -> None:
        """Out of a page, or a filter."""
        if self.look.page != "list":
            self._looks(page="list", scroll=0)
        else:
            self._looks(asked=keys.Asked())

    def action_sort(self, step: int) -> None:
        if self.frame is not None and self.look.page == "list":
            self._looks(sort=self.look.other_sort(self.frame.sortable, step), reverse=False)

    def action_reverse(self) -> None:
        """The other way round."""
        self._looks(reverse=not self.look.reverse)

    def action_horizon(self) -> None:
        self._looks(horizon_s=self.look.next_horizon())

    def action_freeze(self) -> None:
        """Hold what is shown; everything is still taken in."""
        self.frozen = (self.known.frozen(), self._given.clock_ns()) if self.frozen is None else None
        self.show()

    def action_interval(self, step: int) -> None:
        self._due_s = time.monotonic() + self.look.other_interval(step)
        self._looks(every_s=self.look.other_interval(step))

    def action_zero(self) -> None:
        """Counters and horizons begin anew."""
        self.frozen = None
        self.known.zero(self._given.clock_ns(), self._source.dropped)
        self.show()

    # ---- what is typed ----

    def action_filter(self) -> None:
        """Ask what shall pass."""
        self._prompt = Prompt("filter (a text, or --dst, --path, --interface ...)", self._filtered)
        self.show()

    def _filtered(self, typed: str) -> None:
        self._looks(asked=keys.asked(typed), page="list", cursor=0, selected=None)

    def action_order(self, kind: orders.Kind) -> None:
        """Ask for an order, word by word."""
        if not self._given.allow_actions:
            self._tell(f"to {kind} from here, start it with --allow-actions", "yellow")
        elif self._given.steering is None:
            self._tell("there is no steering to ask", "yellow")
        elif self.frame is not None:
            row = self.frame.row
            try:
                question = orders.question(kind, row)
                self._prompt = Prompt(question, lambda typed: self._ordered(orders.order(kind, row, typed)))
            except SwerveError as error:
                self._tell(str(error), "yellow")
        self.show()

    def _ordered(self, order: orders.Order) -> None:
        steering = self._given.steering
        assert steering is not None
        self._tell("asked …")

        def ask() -> None:
            try:
                said, style = "; ".join(order(steering)) or "done", "bold green"
            except SwerveError as error:
                said, style = str(error), "bold red"
            self.call_from_thread(self._answered, said, style)

        self.run_worker(ask, thread=True)

    def _answered(self, said: str, style: str) -> None:
        self._tell(said, style)
        self.show()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """While something is typed, keys are what is typed."""
        return self._prompt is None or action == "interrupt"

    def on_key(self, event: events.Key) -> None:
        prompt = self._prompt
        if prompt is None:
            return
        event.prevent_default()  # it is no key of the list
        if event.key == "escape":
            self._prompt = None
        elif event.key == "enter":
            self._prompt = None
            try:
                prompt.then(prompt.typed)
            except SwerveError as error:
                self._tell(str(error), "bold red")
        else:
            self._prompt = prompt.after(event.key, event.character if event.is_printable else None)
        self.show()

    def on_paste(self, event: events.Paste) -> None:
        """What is pasted where something is typed; never more than that."""
        if self._prompt is not None:
            self._prompt = self._prompt.after("", " ".join(event.text.split()))
            self.show()
