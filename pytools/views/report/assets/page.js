"use strict";
// What the page can do beyond being read: say values under the pointer and the arrow keys, look closer, open what a
// link leads to. It fetches nothing, and puts words in place as text, never as markup.
(() => {
  const main = document.querySelector("main"), tip = document.getElementById("tip");
  const since = Number(main.dataset.since), length = Number(main.dataset.length), WIDTH = 880, LEFT = 74;
  const STEPS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 1.5e4, 3e4, 6e4, 12e4, 3e5, 6e5, 9e5, 18e5, 36e5,
    72e5, 108e5, 216e5, 432e5, 864e5, 1728e5, 6048e5, 2592e6, 31536e6];
  let from = 0, to = length; // what charts show, in milliseconds since the beginning

  // ---- words ----
  const scaled = (value, scales) => {
    for (const [scale, unit] of scales)
      if (Math.abs(value) >= scale) return `${Number((value / scale).toPrecision(4))} ${unit}`;
    return "";
  };
  const said = {
    ns: (v) => scaled(v, [[1e9, "s"], [1e6, "ms"], [1e3, "µs"]]) || `${v} ns`,
    bps: (v) => scaled(v, [[1e9, "Gbit/s"], [1e6, "Mbit/s"], [1e3, "kbit/s"]]) || `${v} bit/s`,
    number: (v) => String(v), count: (v) => String(v),
  };
  const iso = (ms) => new Date(since + ms).toISOString();
  const dated = iso(0).slice(0, 10) !== iso(length).slice(0, 10); // a time of day alone does not say when
  const clock = (ms, digits) =>
    (dated ? `${iso(ms).slice(5, 10)} ` : "") + iso(ms).slice(11, digits ? 20 + digits : 19);

  // ---- what is said beside an element ----
  const show = (words, x, y) => {
    tip.textContent = words;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - box.width - 8))}px`;
    tip.style.top = `${y + 18 + box.height > innerHeight ? Math.max(4, y - box.height - 12) : y + 18}px`;
  };
  const hide = () => { tip.hidden = true; };
  const beside = (element) => {
    const box = element.getBoundingClientRect();
    show(element.dataset.tip, box.left + Math.min(box.width, 40), Math.min(box.bottom, innerHeight - 60) - 12);
  };
  const titled = (element, words) => {
    element.dataset.tip = words;
    element.addEventListener("pointerenter", (event) => { if (words) show(words, event.clientX, event.clientY); });
    element.addEventListener("pointerleave", hide);
    if (!element.matches("a")) return; // of SVG, what listens for the focus gets it
    element.setAttribute("aria-describedby", "tip");
    element.addEventListener("focus", () => beside(element));
    element.addEventListener("blur", hide);
  };
  for (const element of document.querySelectorAll("main [title]")) {
    const words = element.title;
    element.removeAttribute("title");
    titled(element, words);
  }
  for (const title of document.querySelectorAll("main svg title")) {
    const element = title.parentNode, words = title.textContent;
    title.remove();
    titled(element, words);
  }

  // ---- charts ----
  const series = (path) => {
    let bound = null;
    const points = path.dataset.p ? path.dataset.p.split(" ").map((word) => {
      const [at, value, error] = word.split(",");
      if (error !== undefined) bound = error === "-" ? null : Number(error);
      return { at: Number(at), value: Number(value), bound };
    }) : [];
    return { name: path.dataset.name, bar: "bar" in path.dataset, width: Number(path.dataset.w), points };
  };
  const nearest = (points, at) => {
    let low = 0, high = points.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (points[middle].at < at) low = middle + 1; else high = middle;
    }
    return low > 0 && at - points[low - 1].at < points[low].at - at ? points[low - 1] : points[low];
  };
  const value = (one, unit, at) => {
    if (one.bar) {
      const found = one.points.find((point) => point.at <= at && at < point.at + one.width);
      return `${one.name}: ${found ? said[unit](found.value) : 0}`;
    }
    const found = one.points.length ? nearest(one.points, at) : null;
    if (!found || Math.abs(found.at - at) > one.width) return `${one.name}: unknown`;
    const error = found.bound === null ? "" : ` ± ${said[unit](found.bound)}`;
    return `${one.name}: ${said[unit](found.value)}${error}`;
  };
  const charts = [...document.querySelectorAll("svg.chart")].map((svg) => ({
    svg, plot: svg.querySelector(".plot"), cross: svg.querySelector(".cross"), unit: svg.dataset.unit, at: null,
    get series() {
      const found = [...this.plot.querySelectorAll("path[data-p]")].map(series);
      Object.defineProperty(this, "series", { value: found });
      return found;
    },
  }));
  const place = (at) => LEFT + ((at - from) / (to - from)) * WIDTH;
  const read = (chart, at, x, y) => {
    chart.at = Math.max(from, Math.min(to, at));
    chart.cross.setAttribute("x1", place(chart.at));
    chart.cross.setAttribute("x2", place(chart.at));
    chart.cross.setAttribute("visibility", "visible");
    const box = chart.svg.getBoundingClientRect();
    const left = x ?? box.left + (place(chart.at) / chart.svg.viewBox.baseVal.width) * box.width;
    const lines = chart.series.map((one) => value(one, chart.unit, chart.at));
    show([`${clock(chart.at, 3)} UTC`, ...lines].join("\n"), left, y ?? box.top + 10);
  };
  const leave = (chart) => { chart.cross.setAttribute("visibility", "hidden"); hide(); };
  const time = (chart, event) => {
    const box = chart.svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * chart.svg.viewBox.baseVal.width;
    return from + ((x - LEFT) / WIDTH) * (to - from);
  };
  const redraw = () => {
    const scale = WIDTH / length, left = from * scale, width = Math.max(1e-6, (to - from) * scale);
    for (const plot of document.querySelectorAll("main .plot")) {
      const height = plot.viewBox.baseVal.height;
      plot.setAttribute("viewBox", `${left} 0 ${width} ${height}`);
    }
    const step = STEPS.find((each) => (to - from) / 8 <= each) ?? STEPS.at(-1);
    for (const { svg, cross } of charts) {
      const times = svg.querySelector(".times"), y = times.querySelector("text")?.getAttribute("y") ?? 170;
      times.replaceChildren();
      for (let at = Math.ceil((since + from) / step) * step - since; at <= to; at += step) {
        const text = document.createElementNS("http://www.w3.org/2000/svg", "text");
        text.setAttribute("class", "tick");
        text.setAttribute("x", place(at));
        text.setAttribute("y", y);
        text.setAttribute("text-anchor", "middle");
        text.textContent = clock(at, step < 1000 ? 3 : 0);
        times.append(text);
      }
      for (const mark of svg.querySelectorAll(".mark")) {
        const at = Number(mark.dataset.t);
        mark.setAttribute("transform", `translate(${place(at)} 0)`);
        mark.style.display = at < from || at > to ? "none" : "";
      }
      cross.setAttribute("visibility", "hidden");
    }
  };
  const look = (start, end) => {
    const least = Math.min(length, 20);
    if (end - start < least) end = start + least;
    from = Math.max(0, Math.min(start, length - least));
    to = Math.min(length, Math.max(end, from + least));
    redraw();
  };
  const closer = (about, factor) => {
    const half = ((to - from) * factor) / 2;
    look(Math.max(0, about - half), Math.min(length, about + half));
  };
  for (const chart of charts) {
    const { svg } = chart;
    let began = null, box = null;
    svg.addEventListener("pointermove", (event) => {
      if (event.target.closest(".mark")) return;
      read(chart, time(chart, event), event.clientX, event.clientY);
      if (box) {
        const one = place(began), other = Math.max(LEFT, Math.min(LEFT + WIDTH, place(time(chart, event))));
        box.setAttribute("x", Math.min(one, other));
        box.setAttribute("width", Math.abs(other - one));
      }
    });
    svg.addEventListener("pointerdown", (event) => {
      if (event.button || event.pointerType !== "mouse" || event.target.closest(".mark")) return;
      began = Math.max(from, Math.min(to, time(chart, event)));
      box = document.createElementNS("http://www.w3.org/2000/svg", "rect");
      box.setAttribute("class", "chosen");
      box.setAttribute("y", 14);
      box.setAttribute("height", chart.plot.viewBox.baseVal.height);
      svg.append(box);
      svg.setPointerCapture(event.pointerId);
    });
    svg.addEventListener("pointerup", (event) => {
      if (!box) return;
      const ended = Math.max(from, Math.min(to, time(chart, event)));
      box.remove();
      box = null;
      if (Math.abs(place(ended) - place(began)) > 6) look(Math.min(began, ended), Math.max(began, ended));
    });
    svg.addEventListener("pointercancel", () => { box?.remove(); box = null; });
    svg.addEventListener("pointerleave", () => leave(chart));
    svg.addEventListener("dblclick", () => look(0, length));
    svg.addEventListener("blur", () => leave(chart));
    svg.addEventListener("focus", () => read(chart, chart.at ?? (from + to) / 2));
    svg.addEventListener("keydown", (event) => {
      if (event.target !== svg || event.ctrlKey || event.altKey || event.metaKey) return;
      const at = chart.at ?? (from + to) / 2, step = ((to - from) / 200) * (event.shiftKey ? 10 : 1);
      const keys = {
        ArrowLeft: () => read(chart, at - step), ArrowRight: () => read(chart, at + step),
        Home: () => read(chart, from), End: () => read(chart, to),
        "+": () => closer(at, 0.5), "=": () => closer(at, 0.5), "-": () => closer(at, 2), 0: () => look(0, length),
      };
      if (!(event.key in keys)) return;
      keys[event.key]();
      if ("+=-0".includes(event.key)) read(chart, at);
      event.preventDefault();
    });
  }
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });

  // ---- links lead into what is folded ----
  const unfold = () => {
    const found = location.hash && document.getElementById(location.hash.slice(1));
    if (!found) return;
    for (let each = found; each; each = each.parentElement) if (each.tagName === "DETAILS") each.open = true;
    found.scrollIntoView();
    (found.tagName === "DETAILS" ? found.firstElementChild : found).focus({ preventScroll: true });
  };
  addEventListener("hashchange", unfold);
  unfold();
  addEventListener("beforeprint", () => { for (const each of document.querySelectorAll("details")) each.open = true; });
})();
