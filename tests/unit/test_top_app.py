"""The live view under the keys of a person: each does what the help says, in a small terminal and in a large one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
import samples
from samples import AT_NS, SECOND_NS
from support import mentions
from textual import events
from textual.pilot import Pilot
from top_kit import story
from top_pilot import Orders, Script, app, shown, strips, until, without_looking_at_the_clock

from pytools.errors import RefusedError, UsageError
from pytools.views.actions import Mode
from pytools.views.top.app import Top
from pytools.views.top.keys import KEYS, asked

SIZES = [(80, 24), (200, 50)]
Driven = Callable[[Top, Pilot[Any], Script], Awaitable[None]]


def drive(steps: Driven, size: tuple[int, int] = (80, 24), script: Script | None = None, **given: Any) -> Top:
    """Open the view, let the steps be taken, close it."""
    script = script or Script(story())
    made = app(script, **given)

    async def session() -> None:
        with without_looking_at_the_clock(made):
            async with made.run_test(size=size) as pilot:
                await pilot.pause()
                await steps(made, pilot, script)

    run: Coroutine[Any, Any, None] = session()
    asyncio.run(run)
    return made


def rows(view: Top) -> list[str]:
    """The rows of the list: what is below its heading."""
    lines = shown(view)
    heads = ("path", "connection", "interface", "queue pair", "UTC")
    start = next(index for index, each in enumerate(lines) if each.startswith(heads))
    return [each for each in lines[start + 1 :] if each]


def first_words(view: Top, count: int = 3) -> list[str]:
    return [" ".join(each.split()[:2]) for each in rows(view)[:count]]


@pytest.mark.parametrize("size", SIZES)
def test_what_the_screen_shows_is_what_was_drawn(size: tuple[int, int]) -> None:
    async def steps(view: Top, pilot: Pilot[Any], _: Script) -> None:
        assert view.frame is not None and len(view.frame.lines) == size[1]
        drawn = strips(view)
        on_screen = ["".join(segment.text for segment in strip).rstrip() for strip in drawn]
        assert on_screen == shown(view)

    drive(steps, size)


@pytest.mark.parametrize("size", SIZES)
def test_numbers_choose_the_panel_and_what_is_asked_for(size: tuple[int, int]) -> None:
    async def steps(view: Top, pilot: Pilot[Any], script: Script) -> None:
        seen = []
        for key in "1234":
            await pilot.press(key)
            seen.append((view.look.panel, rows(view)[0].split()[0]))
            assert ("tcp_flow" in script.wanted) == (key == "2")
            assert ("link" in script.wanted) == (key == "3")
        assert seen[:3] == [("paths", "h2"), ("flows", "10.9.0.1:40029"), ("links", "rail1")]
        assert [each[0] for each in seen] == ["paths", "flows", "links", "events"]
        await pilot.press("3", "3")
        assert view.look.panel == "rdma" and rows(view)[0].startswith("rxe0 20")
        await pilot.press("3")
        assert view.look.panel == "links"

    drive(steps, size)


@pytest.mark.parametrize("size", SIZES)
def test_arrows_and_letters_move_the_cursor(size: tuple[int, int]) -> None:
    async def steps(view: Top, pilot: Pilot[Any], _: Script) -> None:
        await pilot.press("2")
        places = []
        for key in ("down", "j", "up", "k", "k", "end", "home", "G", "g", "pagedown", "pageup"):
            await pilot.press(key)
            places.append(view.look.cursor)
        page = view.frame.page if view.frame else 0
        assert places == [1, 2, 1, 0, 0, 29, 0, 29, 0, min(page, 29), 0]
        await pilot.press("G")
        assert view.frame is not None and view.frame.row.local_port == 40_000
        assert any("10.9.0.1:40000 " in each for each in rows(view)), "the cursor is out of sight"

    drive(steps, size)


def test_the_cursor_stays_on_its_row_when_the_order_changes() -> None:
    async def steps(view: Top, pilot: Pilot[Any], script: Script) -> None:
        await pilot.press("down")
        assert view.frame is not None and view.frame.row.name == "h2 rail2"
        script.tell(samples.path_state(1, AT_NS + 1, "healthy", 1), samples.path_state(3, AT_NS + 1, "drained", 0))
        view.turn()
        view.tick()
        assert first_words(view)[0] == "h2 rail3" and view.frame.row.name == "h2 rail2"

    drive(steps)


def test_the_first_row_stays_selected_as_long_as_nobody_chose_another() -> None:
    async def steps(view: Top, pilot: Pilot[Any], script: Script) -> None:
        script.tell(samples.path_state(1, AT_NS + 1, "healthy", 1), samples.path_state(3, AT_NS + 1, "drained", 0))
        view.turn()
        view.tick()
        assert view.frame is not None and view.frame.row.name == "h2 rail3"

    drive(steps)


def test_left_and_right_show_other_columns() -> None:
    async def steps(view: Top, pilot: Pilot[Any], _: Script) -> None:
        heading = shown(view)[2].split()
        await pilot.press("left")
        assert shown(view)[2].split() == heading
        await pilot.press("right")
        assert shown(view)[2].split()[:2] == ["path", "q"]
        for _step in range(40):
            await pilot.press("right")
        assert shown(view)[2].split()[-1] == "reason" and "queueing 41 ms" in rows(view)[0]
        for _step in range(40):
            await pilot.press("left")
        assert shown(view)[2].split() == heading

    drive(steps)


@pytest.mark.parametrize("size", SIZES)
def test_enter_shows_all_about_a_row_and_escape_goes_back(size: tuple[int, int]) -> None:
    async def steps(view: Top, pilot: Pilot[Any], _: Script) -> None:
        await pilot.press("enter")
        assert any("queueing of single probes" in each for each in shown(view))
        assert any("suspect → drained" in each for each in shown(view)) or size == (80, 24)
        await pilot.press("end")
        assert any("its queue is full" in each or "healthy → suspect" in each for each in shown(view))
        await pilot.press("home", "escape")
        assert rows(view)[0].startswith("h2 rail1")
        for key, word in (("2", "retransmitted_segments"), ("3", "carrier_changes"), ("4", "act_id")):
            await pilot.press(key, *(("down",) if key == "4" else ()), "enter")
            found = []
            for _page in range(8):
                found += shown(view)
                await pilot.press("pagedown")
            assert any(word in each for each in found), word
            await pilot.press("escape")
            assert view.look.page == "list"

    drive(steps, size)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("key", ["question_mark", "h"])
def test_help_lists_every_key_that_is_bound(size: tuple[int, int], key: str) -> None:
    async def steps(view: Top, pilot: Pilot[Any], _: Script) -> None:
        await pilot.press(key)
        found = "\n".join(shown(view))
        bound = {
            (one.binding.action, one.binding.description) for one in view.active_bindings.values() if one.node is view
        }
        ours = {(each.action, each.words) for each in KEYS}
        assert ours <= bound
        for action, words in bound:
            if action not in ("command_palette", "help_quit", "quit"):
                assert (action, words) in ours and words in found
        await pilot.press(key)
        assert view.look.page == "list"
        await pilot.press(key, "escape")
        assert view.look.page == "list"

    drive(steps, size)


def test_a_slash_asks_for_a_filter_and_escape_takes_it_away() -> None:
    async def steps(view: Top, pilot: Pilot[Any], _: Script) -> None:
        await pilot.press("slash", *"rail2q", "backspace", "enter")
        await pilot.pause()
        assert view.look.asked.text == "rail2" and first_words(view, 1) == ["h2 rail2"]
        assert any("filter: rail2 (1 of 3)" in each for each in shown(view))
        await pilot.press("escape")
        assert not view.look.asked and len([each for each in first_words(view) if each.startswith("h2 rail")]) == 3
        await pilot.press("slash", *"--path", "space", *"rail3", "enter")
        await pilot.pause()
        assert first_words(view, 1) == ["h2 rail3"]
        await pilot.press("slash", *"--color", "space", *"red", "enter")
        await pilot.pause()
        with pytest.raises(UsageError) as refused:
            asked("--color red")
        error = str(refused.value)
        assert len(error) > 80 and " ".join(shown(view)[-4:]).endswith(" ".join(error.split())), "it is cut off"
        assert len(shown(view)) == 24 and first_words(view, 1) == ["h2 rail3"]
        await pilot.press("slash", *"rail1", "escape")
        await pilot.pause()
        assert first_words(view, 1) == ["h2 rail3"], "what was not entered counts"
        await pilot.press("slash", "enter")
        await pilot.pause()
        assert not view.look.asked

    drive(steps)


def test_what_is_typed_at_once_is_typed_and_what_is_pasted_only_where_something_is_asked() -> None:
    async def steps(view: Top, pilot: Pilot[Any], _: Script) -> None:
        for char in "/rail3\rt":
            view.post_message(events.Key({"/": "slash", "\r": "enter"}.get(char, char), char))
        await pilot.pause()
        assert view.look.asked.text == "rail3" and view.look.page == "list" and view.look.horizon_s == 40
        view.post_message(events.Paste("qd2"))
        await pilot.pause()
        assert view.look.panel == "paths" and view.return_code is None
        await pilot.press("slash", "x", "ctrl+u")
        view.post_message(events.Paste("rail1\nq"))
        await pilot.press("backspace", "backspace", "enter")
        await pilot.pause()
        assert view.look.asked.text == "rail1"

    drive(steps)


def test_s_sorts_by_column_and_r_reverses() -> None:
    async def steps(view: Top, pilot: Pilot[Any], _: Script) -> None:
        assert view.frame is not None
        columns = view.frame.sortable
        seen = []
        for _step in range(len(columns) + 1):
            await pilot.press("s")
            seen.append(view.look.sort)
        assert seen == [*columns, None]
        await pilot.press("S")
        assert view.look.sort == columns[-1]
        await pilot.press("s", "s")
        assert view.look.sort == "path" and "path" in shown(view)[1]
        assert first_words(view) == ["h2 rail1", "h2 rail2", "h2 rail3"]
        await pilot.press("r")
        assert first_words(view) == ["h2 rail3", "h2 rail2", "h2 rail1"] and "reversed" in shown(view)[1]
        await pilot.press("r", "S")
        assert view.look.sort is None and first_words(view, 1) == ["h2 rail1"]

    drive(steps)


def test_t_changes_the_horizon() -> None:
    async def steps(view: Top, pilot: Pilot[Any], _: Script) -> None:
        loss = []
        for _step in range(3):
            await pilot.press("t")
            loss.append((view.look.horizon_s, rows(view)[0].split()[6]))
            assert f"last {view.look.horizon_s} s" in shown(view)[1]
        assert loss == [(40, "0.50"), (2, "2.0"), (10, "2.0")]

    drive(steps)


def test_space_freezes_what_is_shown_and_loses_nothing() -> None:
    async def steps(view: Top, pilot: Pilot[Any], script: Script) -> None:
        await pilot.press("space")
        before = rows(view)
        assert "FROZEN" in shown(view)[2]
        script.tell(samples.path_state(1, AT_NS + SECOND_NS, "healthy", 1), samples.path_delay(4, AT_NS + SECOND_NS))
        view.turn()
        view.tick()
        assert rows(view) == before
        await pilot.press("down", "enter", "escape", "t", "t", "t")  # it can be looked at
        assert rows(view)[:3] == before[:3]
        await pilot.press("space")
        assert "FROZEN" not in "\n".join(shown(view))
        assert "healthy" in next(each for each in rows(view) if each.startswith("h2 rail1"))
        assert any(each.startswith("h2 rail4") for each in rows(view))

    drive(steps)


def test_plus_and_minus_change_the_interval() -> None:
    async def steps(view: Top, pilot: Pilot[Any], _: Script) -> None:
        seen = []
        for key in ("plus", "equals_sign", "minus", "minus", "minus", *["minus"] * 9, *["plus"] * 20):
            await pilot.press(key)
            seen.append(view.look.every_s)
            assert f"every {view.look.every_s:g} s" in shown(view)[1]
        assert seen[:5] == [2.0, 5.0, 2.0, 1.0, 0.5] and min(seen) == 0.1 and seen[-1] == 60.0

    drive(steps)


def test_z_zeroes_counters_and_horizons() -> None:
    async def steps(view: Top, pilot: Pilot[Any], script: Script) -> None:
        script.tell(samples.self_cost(AT_NS + 1, drops={"ring_full": 3}))
        view.turn()
        await pilot.press("z")
        assert "lost 0" in shown(view)[0] and "zeroed 0s ago" in shown(view)[2]
        assert rows(view)[0].split()[4] == "\u2013"  # no window since
        script.tell(samples.path_delay(1, AT_NS + SECOND_NS), samples.self_cost(AT_NS + 2, drops={"ring_full": 5}))
        view.turn()
        view.tick()
        assert "lost 2" in shown(view)[0] and "6.70 µs" in rows(view)[0]
        await pilot.press("2")
        assert rows(view)[0].split()[3] == "0"

    drive(steps)


@pytest.mark.parametrize(("key", "code"), [("q", 0), ("ctrl+c", 130)])
def test_keys_that_end_it(key: str, code: int) -> None:
    async def steps(view: Top, pilot: Pilot[Any], _: Script) -> None:
        await pilot.press("4", "enter", key)

    assert drive(steps).return_code == code


def test_ctrl_c_ends_it_while_something_is_typed_and_q_does_not() -> None:
    async def steps(view: Top, pilot: Pilot[Any], _: Script) -> None:
        await pilot.press("slash", "q")
        assert view.return_code is None
        await pilot.press("ctrl+c")

    assert drive(steps).return_code == 130


def test_it_ends_after_so_many_frames() -> None:
    async def steps(view: Top, pilot: Pilot[Any], _: Script) -> None:
        view.tick()
        assert view.return_code is None
        view.tick()

    assert drive(steps, count=2).return_code == 0


# ---- orders ----


@pytest.mark.parametrize("key", ["d", "u", "p", "n"])
def test_nothing_can_be_ordered_unless_it_was_allowed(key: str) -> None:
    orders = Orders()

    async def steps(view: Top, pilot: Pilot[Any], _: Script) -> None:
        await pilot.press(key)
        assert "--allow-actions" in shown(view)[-1]
        await pilot.press(*"drain", "space", *"rail1", "enter")
        await pilot.pause()

    drive(steps, steering=orders)
    assert orders.asked == []


async def _answered(view: Top) -> str:
    await until(lambda: "asked" not in shown(view)[-1])
    return shown(view)[-1]


def test_a_drain_is_typed_out_asked_for_and_its_answer_shown() -> None:
    orders = Orders(Mode(True, True))

    async def steps(view: Top, pilot: Pilot[Any], _: Script) -> None:
        await pilot.press("d", *"drain", "space", *"rail1", "space", *"1h", "enter")
        assert await _answered(view) == "drain rail1 1h"
        await pilot.press("u", *"undrain", "space", *"rail1", "enter")
        assert await _answered(view) == "undrain rail1"
        await pilot.press("2", "p", *"pin", "space", *"rail2", "space", *"10m", "enter")
        assert await _answered(view) == "pin 40029 rail2 10m"
        await pilot.press("n", *"unpin", "enter")
        assert await _answered(view) == "unpin 40029"

    drive(steps, steering=orders, allow_actions=True)
    assert [each[0] for each in orders.asked] == ["drain", "undrain", "pin", "unpin"]


def test_an_order_that_was_not_typed_in_full_is_none() -> None:
    orders = Orders()

    async def steps(view: Top, pilot: Pilot[Any], _: Script) -> None:
        await pilot.press("d", *"yes", "enter")
        assert "nothing was done; type `drain rail1`" in await _answered(view)
        await pilot.press("d", *"drain", "space", *"rail1", "escape")
        await pilot.press("d", "enter")
        await pilot.press("4", "d")
        assert "only an interface can be drained" in shown(view)[-1]

    drive(steps, (200, 50), steering=orders, allow_actions=True)
    assert orders.asked == []


def test_a_refusal_is_shown_and_the_view_goes_on() -> None:
    orders = Orders(refusal=RefusedError("nothing measured would be left", "drain another"))

    async def steps(view: Top, pilot: Pilot[Any], _: Script) -> None:
        await pilot.press("d", *"drain", "space", *"rail1", "enter")
        assert mentions(await _answered(view), "nothing measured would be left", "drain another")
        await pilot.press("2")
        assert view.look.panel == "flows"

    drive(steps, steering=orders, allow_actions=True)


def test_the_mode_and_what_is_to_be_confirmed_come_from_steering() -> None:
    async def steps(view: Top, pilot: Pilot[Any], _: Script) -> None:
        assert " steering " in shown(view)[0] and "CONFIRM within 30 s" in shown(view)[2]

    drive(steps, steering=Orders(Mode(True, True, 30.0)))


# ---- colours, sizes, failures ----


def test_without_colour_there_is_none_and_with_it_only_the_sixteen() -> None:
    colors: dict[bool, set[str]] = {}

    def steps_for(color: bool) -> Driven:
        async def steps(view: Top, pilot: Pilot[Any], _: Script) -> None:
            styles = [segment.style for strip in strips(view) for segment in strip]
            found = {each for style in styles if style for each in (style.color, style.bgcolor) if each is not None}
            colors[color] = {each.name for each in found if each.type.name != "DEFAULT"}
            assert all(each.type.name in ("DEFAULT", "STANDARD") for each in found)

        return steps

    for color in (True, False):
        drive(steps_for(color), (200, 50), color=color)
    assert "red" in colors[True] and colors[False] == set()


def test_lines_of_one_style_have_it() -> None:
    async def steps(view: Top, pilot: Pilot[Any], _: Script) -> None:
        drawn = strips(view)
        heading, hints = drawn[2], drawn[-1]
        assert all(part.style and part.style.bold and part.style.underline for part in heading if part.text.strip())
        assert all(part.style and part.style.dim for part in hints if part.text.strip())

    drive(steps)


def test_another_size_is_another_frame() -> None:
    async def steps(view: Top, pilot: Pilot[Any], _: Script) -> None:
        for size in ((200, 50), (80, 24), (30, 6), (120, 40)):
            await pilot.resize_terminal(*size)
            await until(lambda size=size: view.frame is not None and len(view.frame.lines) == size[1])

    drive(steps)


def test_an_agent_that_is_gone_ends_it_with_its_reason() -> None:
    class Gone(Script):
        def read(self) -> list[bytes]:
            if not self.wanted:
                return super().read()
            raise RefusedError("gone")

    async def steps(view: Top, pilot: Pilot[Any], _: Script) -> None:
        view.turn()

    made = drive(steps, script=Gone(story()))
    assert made.return_code == 4 and str(made.failure) == "gone"


def test_nobody_at_the_terminal_ends_it() -> None:
    async def steps(view: Top, pilot: Pilot[Any], _: Script) -> None:
        view.turn()

    assert drive(steps, is_gone=lambda: True).return_code == 129
