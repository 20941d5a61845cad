"use strict";
// Charts of the JSON in the page. Plain ASCII, no library, nothing fetched.

const root = document.documentElement;
addEventListener("error", (event) => { root.dataset.error = event.message; });
addEventListener("securitypolicyviolation", (event) => { root.dataset.error = `blocked: ${event.violatedDirective}`; });

const byId = (id) => document.getElementById(id);
const data = JSON.parse(byId("data").textContent);

function svg(name, attributes, parent, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  if (parent) parent.append(element);
  return element;
}

// --- curves ---------------------------------------------------------------------------------------------------------

const number = (v) => (v === 0 ? "0" : Math.abs(v) >= 0.001 && Math.abs(v) < 1e5 ? String(+v.toPrecision(4)) : v.toExponential(2));
const percent = (v) => `${(100 * v).toFixed(2)} %`;
const isKnown = (v) => v !== null && v !== undefined;
const MARGIN = { left: 52, right: 14, top: 12, bottom: 36 };
const HEIGHT = 250;

/** Exponential moving average, corrected for its start; unknown values stay unknown. */
function smooth(values, weight) {
  let sum = 0, norm = 0;
  return values.map((v) => {
    if (!isKnown(v)) return null;
    sum = weight * sum + v;
    norm = weight * norm + 1;
    return sum / norm;
  });
}

function linearTicks(low, high) {
  const rough = (high - low) / 5, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((m) => m * power >= rough);
  const ticks = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) ticks.push(k * step);
  return ticks;
}

function logTicks(low, high) {
  const exponents = Array.from({ length: Math.ceil(Math.log10(high)) - Math.floor(Math.log10(low)) + 1 },
    (_, i) => Math.floor(Math.log10(low)) + i);
  const ticks = exponents.flatMap((e) => [1, 2, 5].map((m) => m * 10 ** e)).filter((t) => t >= low && t <= high);
  return ticks.length > 1 ? ticks : linearTicks(low, high);
}

/** Return the ticks of y, and the function from value to pixel. */
function verticalScale(values, options) {
  const bottom = HEIGHT - MARGIN.bottom;
  const usable = options.log ? values.filter((v) => v > 0) : values;
  let low = options.log ? Math.min(...usable) : 0;
  let high = options.top || Math.max(...usable) * 1.04;
  if (!(high > low)) [low, high] = options.log ? [low / 2, low * 2] : [low, low + 1];
  const at = options.log ? Math.log : (v) => v;
  const share = (v) => (at(v) - at(low)) / (at(high) - at(low));
  return { ticks: options.log ? logTicks(low, high) : linearTicks(low, high),
    y: (v) => (options.log && v <= 0 ? null : Math.max(bottom - share(v) * (bottom - MARGIN.top), MARGIN.top)) };
}

/** Return a top that a few slow steps do not move; undefined if there are none. */
function robustTop(values) {
  const known = values.filter(isKnown).sort((a, b) => a - b);
  const usual = known[Math.floor(0.9 * (known.length - 1))];
  return known.at(-1) > 3 * usual && usual > 0 ? 1.5 * usual : undefined;
}

function makePath(xs, ys, x, y) {
  let pen = false, d = "";
  xs.forEach((at, i) => {
    const height = isKnown(ys[i]) ? y(ys[i]) : null;
    if (height !== null) d += `${pen ? "L" : "M"}${x(at).toFixed(1)},${height.toFixed(1)}`;
    pen = height !== null;
  });
  return d;
}

function drawAxes(image, width, scale, x, lastEpoch, format, marks) {
  const bottom = HEIGHT - MARGIN.bottom;
  for (const tick of scale.ticks) {
    svg("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: scale.y(tick), y2: scale.y(tick) }, image);
    svg("text", { x: MARGIN.left - 6, y: scale.y(tick) + 4, "text-anchor": "end" }, image, format(tick));
  }
  svg("line", { class: "axis", x1: MARGIN.left, x2: width - MARGIN.right, y1: bottom, y2: bottom }, image);
  for (const tick of linearTicks(0, lastEpoch))
    svg("text", { x: x(tick), y: bottom + 16, "text-anchor": "middle" }, image, number(tick));
  svg("text", { x: width - MARGIN.right, y: HEIGHT - 4, "text-anchor": "end" }, image, "epoch");
  for (const { epoch, text } of marks) {
    const mark = svg("line", { class: "resume", x1: x(epoch), x2: x(epoch), y1: MARGIN.top, y2: bottom }, image);
    svg("title", {}, mark, text);
  }
}

/** Compute what each series shows: smoothed if it asks for it; in a stack, on top of the series before it. */
function arrange(series, stacked) {
  let below = null;
  for (const s of series) {
    const weight = s.smooth ? +byId("smoothing").value : 0;
    s.base = below;
    s.isSmoothed = weight > 0;
    s.shown = weight ? smooth(s.values, weight) : s.values;
    if (stacked) below = s.shown = s.values.map((v, i) => (v || 0) + (below ? below[i] : 0));
  }
}

/** Make a chart in `holder` and return the function that draws it. `list` returns the series to draw:
 *  name, kind (a class of the style sheet), steps, epochs and values, one of each per point. */
function chart(holder, name, list, options) {
  const format = options.format || number;
  let cursor = -1;

  function draw() {
    holder.replaceChildren();
    const series = list();
    arrange(series, options.stacked);
    const values = series.flatMap((s) => (s.isSmoothed ? s.values : s.shown)).filter(isKnown);
    if (!values.length) {
      holder.textContent = "Nothing measured yet.";
      return;
    }
    const width = Math.max(holder.clientWidth, 240);
    const lastEpoch = Math.max(...series.map((s) => (s.epochs.length ? s.epochs.at(-1) : 0)));
    const x = (epoch) => MARGIN.left + (epoch / lastEpoch) * (width - MARGIN.left - MARGIN.right);
    const top = options.robust ? robustTop(series.at(-1).shown) : options.top;
    const scale = verticalScale(values, { log: options.log && options.log(), top });
    const image = svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", tabindex: 0, "aria-label": describe(name, series, format) }, holder);
    drawAxes(image, width, scale, x, lastEpoch, options.tick || format, options.marks || []);
    for (const s of series) (options.stacked ? drawArea : drawSeries)(image, s, x, scale.y);
    addCursor(image, series, width, x, scale.y);
  }

  function drawArea(image, s, x, y) {
    const floor = s.base || s.shown.map(() => 0);
    const back = makePath([...s.epochs].reverse(), [...floor].reverse(), x, y).replace("M", "L");
    svg("path", { class: `area ${s.kind}`, d: `${makePath(s.epochs, s.shown, x, y)}${back}Z` }, image);
  }

  function drawSeries(image, s, x, y) {
    if (s.isSmoothed) svg("path", { class: `raw ${s.kind}`, d: makePath(s.epochs, s.values, x, y) }, image);
    svg("path", { class: s.kind, d: makePath(s.epochs, s.shown, x, y) }, image);
    const radius = s.epochs.length > 60 ? 1.5 : 3.5;
    if (s.dots || s.epochs.length === 1) s.epochs.forEach((at, i) => {
      const height = isKnown(s.values[i]) ? y(s.values[i]) : null;
      if (height !== null) svg("circle", { class: s.kind, cx: x(at), cy: height, r: radius }, image);
    });
  }

  function addCursor(image, series, width, x, y) {
    const longest = series.reduce((a, b) => (b.steps.length > a.steps.length ? b : a));
    const layer = svg("g", {}, image), tip = document.createElement("div");
    tip.className = "tip";
    tip.hidden = true;
    holder.append(tip);
    const hide = () => { layer.replaceChildren(); tip.hidden = true; };
    const show = (index) => {
      cursor = Math.min(Math.max(index, 0), longest.steps.length - 1);
      const epoch = longest.epochs[cursor], at = x(epoch);
      hide();
      svg("line", { class: "cursor", x1: at, x2: at, y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom }, layer);
      const lines = [`step ${Math.round(longest.steps[cursor])}, epoch ${epoch.toFixed(1)}`];
      for (const s of series) {
        const i = findNearest(s.epochs, epoch), raw = s.values[i], height = isKnown(raw) ? y(s.shown[i]) : null;
        if (i < 0) continue;
        const position = s.steps.length === longest.steps.length ? "" : ` at step ${Math.round(s.steps[i])}`;
        lines.push(`${s.name} ${isKnown(raw) ? format(raw) : "non-finite"}${position}`);
        if (height !== null) svg("circle", { class: s.kind, cx: x(s.epochs[i]), cy: height, r: 4 }, layer);
      }
      if (options.stacked) lines.push(`together ${format(series.at(-1).shown[cursor])}`);
      tip.textContent = lines.join("\n");
      tip.hidden = false;
      tip.style.left = `${at < width / 2 ? Math.min(at + 10, width - tip.offsetWidth) : Math.max(at - tip.offsetWidth - 10, 0)}px`;
    };
    const pick = (event) => {
      const box = image.getBoundingClientRect();
      const epoch = ((event.clientX - box.left) / box.width * width - MARGIN.left) / (x(1) - x(0));
      show(findNearest(longest.epochs, epoch));
    };
    image.addEventListener("pointermove", pick);
    image.addEventListener("pointerdown", pick);
    image.addEventListener("pointerleave", hide);
    image.addEventListener("blur", hide);
    image.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!move) return;
      event.preventDefault();
      show(cursor + move);
    });
  }
  return draw;
}

/** Draw all charts, now and whenever a control or the width changes. */
function drawAll(draws) {
  const draw = () => {
    byId("smoothing-value").textContent = (+byId("smoothing").value).toFixed(2);
    draws.forEach((drawChart) => drawChart());
  };
  document.querySelectorAll("#curve-controls input").forEach((control) => control.addEventListener("input", draw));
  addEventListener("resize", draw);
  draw();
}

/** Return the index of the number nearest to `target` in an ascending list; -1 if the list is empty. */
function findNearest(numbers, target) {
  let low = 0, high = numbers.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (numbers[middle] < target) low = middle; else high = middle;
  }
  if (!numbers.length) return -1;
  return Math.abs(numbers[high] - target) < Math.abs(numbers[low] - target) ? high : low;
}

function describe(name, series, format) {
  const parts = series.map((s) => ({ name: s.name, values: s.values.filter(isKnown) })).filter((s) => s.values.length);
  return `${name} by epoch. ` + parts.map((s) => `${s.name} from ${format(s.values[0])} to ${format(s.values.at(-1))}`).join("; ");
}

// Printing shows the contents of all collapsed sections.
let collapsed = [];
addEventListener("beforeprint", () => { collapsed = [...document.querySelectorAll("details:not([open])")]; collapsed.forEach((d) => { d.open = true; }); });
addEventListener("afterprint", () => collapsed.forEach((d) => { d.open = false; }));
